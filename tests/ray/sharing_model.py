"""The transformer of `layered_model`, of which ranks may share sequences besides layers: as a user would write it."""

from __future__ import annotations

import math
from typing import Any

import layered_model
import pipeline_model
import torch
from layered_model import LENGTH, VOCABULARY
from layered_model import logits_of as logits_of
from sequence_model import IGNORED
from sequence_model import loss_of as loss_of
from texts import Text, Texts, tokens
from torch import nn

import elastic


def texts(size: int, given: list[int] | None = None) -> Texts:
    return Texts(text, size, given)


def text(index: int) -> Text:
    """Of the labels as many count as differs by sample: none in some parts."""
    generator = torch.Generator().manual_seed(index)
    words, labels = tokens(generator, VOCABULARY, LENGTH)
    labels[int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = IGNORED
    return words, labels


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """Of the heads that this rank's slices have; those of keys and values as often as there are ranks for them."""
    attention, size = nn.functional.scaled_dot_product_attention, elastic.sequence.size()
    times = size // math.gcd(size, key.shape[1])
    key, value = (heads.repeat_interleave(times, 1) for heads in (key, value))
    return elastic.sequence.attention(attention, query, key, value, **given)


class Places(pipeline_model.Places):
    def own(self, places: torch.Tensor) -> torch.Tensor:
        return elastic.sequence.split(places, dim=0)


def share(model: Any) -> None:
    """The sequences of a model of `staged_model`: its first layer splits them."""
    model.places = Places()
    model.embed.register_forward_pre_hook(lambda _, given: tuple(map(elastic.sequence.split, given)))
    for layer in model.layers:
        layer.self_attn.attend = attend


class Transformer(layered_model.Transformer):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for layer in self.layers:
            layer.self_attn.attend = attend

    def placed(self, words: torch.Tensor) -> torch.Tensor:
        places = elastic.sequence.split(self.places.weight, dim=0)
        found: torch.Tensor = self.embed(elastic.sequence.split(words)) + places
        return found

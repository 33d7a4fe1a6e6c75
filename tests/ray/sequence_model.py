"""A small transformer whose sequences ranks may share, its data and its loss: written as a user would write them."""

from __future__ import annotations

from typing import Any

import torch
from texts import Text, Texts, tokens
from torch import nn

import elastic

LENGTH, VOCABULARY, WIDTH, HEADS = 8, 24, 16, 4
# Labels that do not count, as people mark padding: parts have different numbers of tokens.
IGNORED = -100


def texts(size: int, given: list[int] | None = None) -> Texts:
    return Texts(text, size, given)


def text(index: int) -> Text:
    """Of the labels as many count as differs by sample: none in some parts."""
    generator = torch.Generator().manual_seed(index)
    words, labels = tokens(generator, VOCABULARY, LENGTH)
    labels[int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = IGNORED
    return words, labels


class Transformer(nn.Module):
    """The keys have no bias: its gradient is zero but for rounding, which Adam would make as large as any other."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        x = self.token(words) + self.place(places)
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = elastic.sequence.attention(nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        answer: torch.Tensor = self.head(x)
        return answer


def logits_of(engine: Any, words: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = engine(elastic.sequence.split(words), elastic.sequence.split(torch.arange(LENGTH), dim=0))
    return answer


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`labels` of the whole sequences."""
    own = elastic.sequence.split(labels)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), own.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return elastic.sequence.mean(total, (own != IGNORED).sum())

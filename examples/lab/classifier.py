"""DistilBERT for two classes (arXiv 1910.01108): transformers' own where it is installed, else its shape in torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.sentences import PAD

CLASSES = 2


@dataclass(frozen=True)
class Shape:
    """Defaults: DistilBERT's, 66,955,010 parameters with the head."""

    vocabulary: int = 30522
    positions: int = 512
    width: int = 768
    layers: int = 6
    heads: int = 12
    dropout: float = 0.1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})


def build(shape: Shape, pretrained: str | None = None) -> nn.Module:
    """`module(ids, labels)` is the mean cross-entropy. `pretrained`: a folder that transformers has written."""
    if importlib.util.find_spec("transformers") is None:
        return Classifier(shape)
    return _FromTransformers(shape, pretrained)


class _FromTransformers(nn.Module):
    def __init__(self, shape: Shape, pretrained: str | None) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        if pretrained is not None:
            self.model = DistilBertForSequenceClassification.from_pretrained(pretrained)
            return
        config = DistilBertConfig(
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.positions,
            dim=shape.width,
            hidden_dim=4 * shape.width,
            n_layers=shape.layers,
            n_heads=shape.heads,
            dropout=shape.dropout,
            num_labels=CLASSES,
        )
        self.model = DistilBertForSequenceClassification(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels).loss


class Classifier(nn.Module):
    """The same tensors as transformers' DistilBertForSequenceClassification, with weights drawn at random."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.words = nn.Embedding(shape.vocabulary, width, padding_idx=PAD)
        self.places = nn.Embedding(shape.positions, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), shape.dropout
        self.layers = nn.ModuleList(_Layer(width, shape.heads, shape.dropout) for _ in range(shape.layers))
        self.before, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """`ids` is [batch, length], `labels` [batch]."""
        drop = self.dropout if self.training else 0.0
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(self.norm(x), drop)
        seen = (ids != PAD)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        # The first position stands for the sentence. The head's dropout is DistilBERT's `seq_classif_dropout`.
        logits = self.head(F.dropout(F.relu(self.before(x[:, 0])), 0.2 if self.training else 0.0))
        return F.cross_entropy(logits, labels)


class _Layer(nn.Module):
    """Normalised after each sum, as in BERT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        drop = self.dropout if self.training else 0.0
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=drop)
        x = self.norm_1(x + self.out(mixed.transpose(1, 2).flatten(2)))
        result: Tensor = self.norm_2(x + F.dropout(self.narrow(F.gelu(self.wide(x))), drop))
        return result

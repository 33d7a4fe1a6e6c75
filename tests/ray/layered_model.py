"""A small transformer with the names of Llama's layers, which AutoTP cuts, its data and its loss: as a user would
write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 16, 4, 21, 19, 6

# Where AutoTP cuts. The hidden size of the MLP is odd: slices differ in size.
LAYERS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
    ],
}


class Texts(torch.utils.data.Dataset[Any]):
    """Token ids and the next ones. `given` are the indices that it was asked for."""

    def __init__(self, size: int, given: list[int] | None = None) -> None:
        self.size = size
        self.given: list[int] = [] if given is None else given

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.given.append(index)
        return text(index)


def text(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
    return tokens[:-1], tokens[1:]


class Attention(nn.Module):
    """As many heads as its slices of the projections have. `normed`: what is left whole is applied to a part."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(WIDTH // HEADS) if normed else nn.Identity()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            made(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = nn.functional.scaled_dot_product_attention(self.q_norm(query), key, value, is_causal=True)
        answer: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return answer


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return answer


class Block(nn.Module):
    def __init__(self, dropout: float, normed: bool) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(WIDTH), Attention(normed)
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        answer: torch.Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return answer


class Transformer(nn.Module):
    """A frozen embedding of places, a buffer that counts the weighted passes, layers as Llama names them."""

    def __init__(self, dropout: float = 0.0, normed: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.places.weight.requires_grad_(False)
        # As Hugging Face's have it: heads are not cut, also where they cannot be shared evenly.
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=WIDTH)
        self.layers = nn.ModuleList(Block(dropout, normed) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        x = self.embed(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        answer: torch.Tensor = self.head(self.norm(x))
        return answer


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

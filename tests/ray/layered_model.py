"""A small transformer with the names of Llama's layers, of which ranks have slices, its data and its loss: as a user
would write them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from texts import Text, Texts, tokens
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 16, 4, 21, 19, 6

# Where AutoTP cuts. The hidden size of the MLP is odd: slices differ in size, which torch's do not.
LAYERS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
    ],
}


# Projections that are one matrix, one after another: query, key and value with half as many heads for the latter two.
KV_HEADS = HEADS // 2
SHARES = {"qkv_proj": (HEADS, KV_HEADS, KV_HEADS), "gate_up_proj": (1, 1)}
FUSED = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [r".*\.qkv_proj\.weight$"],
            "partition_type": "column",
            "shape": [[WIDTH, WIDTH // 2, WIDTH // 2], -1],
            "partition_dim": 0,
        },
        {
            "patterns": [r".*\.gate_up_proj\.weight$"],
            "partition_type": "column",
            "shape": [2, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
    ],
}


# As torch cuts it, which shares out evenly: sizes for that, heads in groups, tied embeddings.
EVEN: dict[str, Any] = {"vocabulary": 20, "hidden": 20, "kv_heads": 2, "tied": True}


def plan() -> dict[str, ParallelStyle]:
    """Everything of it that has a matrix."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def plan_of_sequences() -> dict[str, ParallelStyle]:
    """Between the matrices each rank has a part of the sequences, as torchtitan does it."""
    whole, part = Replicate(), Shard(1)
    gathered = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    divided = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(part,), use_local_output=True)
    return {
        **plan(),
        "layers.0": divided,
        "layers.*.input_layernorm": SequenceParallel(),
        "layers.*.self_attn": gathered,
        "layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=part),
        "layers.*.post_attention_layernorm": SequenceParallel(),
        "layers.*.mlp": gathered,
        "layers.*.mlp.down_proj": RowwiseParallel(output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }


def plan_by_names() -> dict[str, str]:
    """As models of transformers have it: embeddings and head are tied, and left whole."""
    return {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise_rep",
        "layers.*.mlp.up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    }


def texts(size: int, given: list[int] | None = None) -> Texts:
    return Texts(text, size, given)


def text(index: int) -> Text:
    return tokens(torch.Generator().manual_seed(index), VOCABULARY, LENGTH)


class Attention(nn.Module):
    """As many heads as its slices of the projections have. `normed`: what is left whole is applied to a part."""

    attend: Any = staticmethod(nn.functional.scaled_dot_product_attention)

    def __init__(self, normed: bool, kv_heads: int, fused: bool) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(WIDTH // HEADS) if normed else nn.Identity()
        kv = WIDTH // HEADS * kv_heads
        self.shares = (HEADS, kv_heads, kv_heads)
        if fused:
            # Keys' bias would have no gradient but rounding.
            self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * kv, bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(WIDTH, size, bias=bias) for size, bias in ((WIDTH, True), (kv, False), (kv, True))
            )
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if not hasattr(self, "qkv_proj"):
            return [made(x) for made in (self.q_proj, self.k_proj, self.v_proj)]
        made = self.qkv_proj(x)
        one = made.shape[-1] // sum(self.shares)
        return made.split([share * one for share in self.shares], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (made.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for made in self.projected(x))
        grouped = key.shape[1] != query.shape[1]
        seen = self.attend(self.q_norm(query), key, value, is_causal=True, enable_gqa=grouped)
        answer: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return answer


class Mlp(nn.Module):
    def __init__(self, hidden: int, fused: bool) -> None:
        super().__init__()
        if fused:
            self.gate_up_proj = nn.Linear(WIDTH, 2 * hidden)
        else:
            self.gate_proj, self.up_proj = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = hasattr(self, "gate_up_proj")
        gate, up = self.gate_up_proj(x).chunk(2, -1) if both else (self.gate_proj(x), self.up_proj(x))
        answer: torch.Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return answer


class Block(nn.Module):
    def __init__(self, dropout: float, normed: bool, hidden: int, kv_heads: int, fused: bool = False) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(WIDTH), Attention(normed, kv_heads, fused)
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(WIDTH), Mlp(hidden, fused)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        answer: torch.Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return answer


class Transformer(nn.Module):
    """A frozen embedding of places, a buffer that counts the weighted passes, layers as Llama names them."""

    def __init__(
        self,
        dropout: float = 0.0,
        normed: bool = False,
        hidden: int = HIDDEN,
        kv_heads: int = HEADS,
        tied: bool = False,
        vocabulary: int = VOCABULARY,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.places.weight.requires_grad_(False)
        # As Hugging Face's have it: heads are not cut, also where they cannot be shared evenly.
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=kv_heads, hidden_size=WIDTH)
        self.layers = nn.ModuleList(Block(dropout, normed, hidden, kv_heads, fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("passes", torch.zeros(()))
        self.recomputed = False

    def placed(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(words) + self.places.weight[: words.shape[1]]
        return found

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        x = self.placed(words)
        for layer in self.layers.children():
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        answer: torch.Tensor = self.head(self.norm(x))
        return answer


class Numbered(Transformer):
    """Layers, a cache of rotations and `init_weights` as torchtitan has them."""

    def __init__(self, *sizes: Any, **more: Any) -> None:
        super().__init__(*sizes, **more)
        self.tied = self.head.weight is self.embed.weight
        self.layers: Any = nn.ModuleDict({str(number): layer for number, layer in enumerate(self.layers)})
        self.register_buffer("turns", self.rotations(), persistent=False)

    def rotations(self) -> torch.Tensor:
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.linspace(0, 1, WIDTH // 2)
        return torch.polar(torch.ones_like(angles), angles)

    def init_weights(self, buffer_device: torch.device) -> None:
        if self.tied:
            # `to_empty` makes two of them.
            self.head.weight = self.embed.weight
        with buffer_device:
            self.turns, self.passes = self.rotations(), torch.zeros(())
        # The head has the embedding's weight, so that it is drawn again after all others.
        for module in self.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        # Of what was drawn before.
        self.layers["0"].mlp.up_proj.weight.mul_(0.5)

    def placed(self, words: torch.Tensor) -> torch.Tensor:
        pairs = super().placed(words).unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(pairs) * self.turns[: words.shape[1]]).flatten(-2)


def logits_of(engine: Any, words: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = engine(words)
    return answer


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

"""A decoder-only transformer as numbers: its tensors on one rank, for planning before any model is built.

Tensor-parallel slicing follows Megatron (arXiv 1909.08053): query/key/value and the first MLP matrix by columns, the
other two by rows, embeddings by vocabulary; norms and the biases of row-sliced matrices are on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from elastic.core.errors import UsageError


@dataclass(frozen=True)
class Tensors:
    """`count` parameters of `numel` elements each. `expert`: sharded over the ranks that hold the same experts."""

    numel: int
    count: int = 1
    expert: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer. `sequence` counts tokens per sample.

    `kv_heads` and `feed_forward` default to `heads` and 4 x `hidden`. `gated`: three MLP matrices (SwiGLU) instead of
    two. `fused_attention`: no sequence x sequence matrix is kept, and the causal half is skipped (FlashAttention).
    `experts` > 1 puts that many MLPs into each layer, of which a token visits `experts_per_token`.
    `vocabulary` 0 leaves out embeddings and the output layer.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    feed_forward: int = 0
    gated: bool = False
    biases: bool = True
    learned_positions: bool = True
    tied_embeddings: bool = True
    dropout: bool = True
    fused_attention: bool = False
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "feed_forward", self.feed_forward or 4 * self.hidden)
        for field in fields(self):
            value, low = getattr(self, field.name), 0 if field.name == "vocabulary" else 1
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise UsageError(f"model: {field.name} must be an integer of at least {low}, not {value!r}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise UsageError(
                f"model: hidden ({self.hidden}) must be a multiple of heads ({self.heads}), "
                f"and heads a multiple of kv_heads ({self.kv_heads})"
            )
        if self.experts_per_token > self.experts:
            raise UsageError(f"model: experts_per_token ({self.experts_per_token}) is above experts ({self.experts})")

    @property
    def kv_hidden(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden * self.kv_heads // self.heads

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def parameters(self) -> int:
        return sum(tensors.numel * tensors.count for tensors in self.stage_tensors())

    @property
    def matrix_parameters_per_layer(self) -> int:
        """Elements of the matrices that one token is multiplied with in a layer."""
        mlp = self.mlp_matrices * self.hidden * self.feed_forward * self.experts_per_token
        return 2 * self.hidden * (self.hidden + self.kv_hidden) + mlp

    def stage_tensors(
        self, tp: int = 1, pp: int = 1, ep: int = 1, stage: int = 0, layers: int | None = None
    ) -> tuple[Tensors, ...]:
        """Parameters on one rank of pipeline stage `stage` of `pp`, which holds `layers` layers (default: all / pp)."""
        count = self.layers // pp if layers is None else layers
        found = [Tensors(t.numel, t.count * count, t.expert) for t in self._layer(tp, ep)]
        if stage == 0:
            found += self._embedding(tp)
        if stage == pp - 1:
            found += self._norm(1)
            if not self.tied_embeddings or pp > 1:
                found += self._matrix(self.vocabulary * self.hidden, tp)
        return tuple(tensors for tensors in found if tensors.numel and tensors.count)

    def _layer(self, tp: int, ep: int) -> list[Tensors]:
        hidden, kv, wide = self.hidden, self.kv_hidden, self.feed_forward
        found = [*self._norm(2), Tensors(hidden * (hidden + 2 * kv) // tp), Tensors(hidden * hidden // tp)]
        if self.biases:
            found += [Tensors((hidden + 2 * kv) // tp), Tensors(hidden)]
        mlps, sharded = self.experts // ep, self.experts > 1
        found += [Tensors(hidden * wide // tp, self.mlp_matrices * mlps, sharded)]
        if self.biases:
            found += [Tensors(wide // tp, (self.mlp_matrices - 1) * mlps, sharded), Tensors(hidden, mlps, sharded)]
        return found + ([Tensors(hidden * self.experts)] if sharded else [])

    def _norm(self, count: int) -> list[Tensors]:
        return [Tensors(self.hidden, count * (2 if self.biases else 1))]

    def _embedding(self, tp: int) -> list[Tensors]:
        positions = [Tensors(self.sequence * self.hidden)] if self.learned_positions and self.vocabulary else []
        return self._matrix(self.vocabulary * self.hidden, tp) + positions

    @staticmethod
    def _matrix(numel: int, tp: int) -> list[Tensors]:
        return [Tensors(-(-numel // tp))]


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: as even as can be, and the last stage, which has the output layer, has fewest."""
    low, more = divmod(layers, pp)
    return tuple(low + (1 if stage < more else 0) for stage in range(pp))


def _llama(layers: int, hidden: int, heads: int, kv: int, wide: int, vocabulary: int, sequence: int) -> ModelShape:
    return ModelShape(
        layers, hidden, heads, vocabulary, sequence, kv, wide, gated=True, biases=False, learned_positions=False,
        tied_embeddings=False, dropout=False, fused_attention=True,
    )  # fmt: skip


# GPT-2: hparams.json of openai/gpt-2. GPT-3: arXiv 2005.14165, Table 2.1. Llama: the models' own config.json.
MODELS: dict[str, ModelShape] = {
    "gpt2": ModelShape(12, 768, 12, 50257, 1024),
    "gpt2-xl": ModelShape(48, 1600, 25, 50257, 1024),
    "gpt3-6.7b": ModelShape(32, 4096, 32, 50257, 2048),
    "gpt3-175b": ModelShape(96, 12288, 96, 50257, 2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
}


def parse_model(text: str) -> ModelShape:
    """A name of `MODELS`, or `layers=24,hidden=1024,heads=16,vocabulary=50257,sequence=1024`, or both.

    "llama-3-8b,sequence=32768" changes one size of a named model. Raises UsageError naming the word that is wrong.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    sizes: dict[str, Any] = {}
    if words and "=" not in words[0]:
        sizes = vars(_named(words.pop(0))).copy()
    for word in words:
        name, _, value = word.partition("=")
        sizes[_field(name)] = _value(name, value)
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary", "sequence") if name not in sizes]
    if missing:
        raise UsageError(f"model {text!r}: {', '.join(missing)} missing; name a model or give every size")
    return ModelShape(**sizes)


def _named(name: str) -> ModelShape:
    if name not in MODELS:
        raise UsageError(f"no model is called {name!r}; known models: {', '.join(MODELS)}")
    return MODELS[name]


def _field(name: str) -> str:
    names: Sequence[str] = [field.name for field in fields(ModelShape)]
    if name not in names:
        near = get_close_matches(name, names, 1)
        raise UsageError(f"model: unknown size {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return name


def _value(name: str, text: str) -> int | bool:
    if text in ("true", "false"):
        return text == "true"
    if not text.isdecimal():
        raise UsageError(f"model: {name} must be an integer, true or false, not {text!r}")
    return int(text)

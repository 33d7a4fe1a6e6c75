"""Peak memory of the fullest rank, by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from elastic.planner.activations import in_flight, layer_activations
from elastic.planner.model_shape import ModelShape, Tensors, stage_layers
from elastic.planner.states import BF16_ADAM, Dtypes, StateBytes, partition_elements, state_bytes, whole_elements
from elastic.planner.strategy import Mesh, Strategy


@dataclass(frozen=True)
class BufferSizes:
    """DeepSpeed's buffer sizes in elements, with its defaults (`zero/config.py`; stage 0: `engine.py`)."""

    reduce_bucket: int = 500_000_000
    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    persistence_threshold: int = 100_000
    sub_group: int = 1_000_000_000

    @classmethod
    def from_deepspeed(cls, zero: Mapping[str, Any]) -> BufferSizes:
        """From the "zero_optimization" section of a DeepSpeed configuration."""
        keys = {
            "reduce_bucket": "reduce_bucket_size",
            "prefetch": "stage3_prefetch_bucket_size",
            "max_live": "stage3_max_live_parameters",
            "persistence_threshold": "stage3_param_persistence_threshold",
            "sub_group": "sub_group_size",
        }
        given = {name: zero[key] for name, key in keys.items() if isinstance(zero.get(key), (int, float))}
        return cls(**{name: int(value) for name, value in given.items()})


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one rank. The peak is in the backward pass or in the optimizer's step, whichever needs more."""

    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    buffers: int = 0
    activations: int = 0
    working: int = 0
    logits: int = 0
    step: int = 0
    reserve: int = 0
    offload: int = 0
    pipeline_stage: int = field(default=0, compare=False)

    @property
    def total(self) -> int:
        """Device bytes at the peak. `offload` lies in host memory."""
        passing = self.activations + self.working + self.logits
        held = self.weights + self.optimizer + self.gradients + self.buffers + self.reserve
        return held + max(passing, self.step)


@dataclass(frozen=True)
class MemoryModel:
    """`reserve_bytes`: CUDA context, NCCL and allocator slack; 2 GiB is an assumption until a node measures it.

    `logit_bytes`: bytes per logit at the loss: two-byte logits, an fp32 copy and a two-byte gradient.
    """

    dtypes: Dtypes = BF16_ADAM
    buffers: BufferSizes = BufferSizes()
    reserve_bytes: int = 2 * 2**30
    logit_bytes: int = 8

    def peak(self, model: ModelShape, strategy: Strategy, mesh: Mesh) -> MemoryBreakdown:
        """The fullest pipeline stage: the first holds most micro-batches, the last the logits."""
        stages = sorted({0, mesh.pp - 1})
        return max((self.stage(model, strategy, mesh, stage) for stage in stages), key=lambda found: found.total)

    def stage(self, model: ModelShape, strategy: Strategy, mesh: Mesh, stage: int) -> MemoryBreakdown:
        """A rank of pipeline stage `stage`."""
        layers = stage_layers(model.layers, mesh.pp)[stage]
        groups = _groups(model, mesh, stage, layers)
        states, held = _states(groups, strategy.zero_stage, mesh, self.dtypes)
        layer = layer_activations(model, strategy, mesh)
        logits = 0
        if stage == mesh.pp - 1:
            tokens = strategy.micro_batch * model.sequence
            logits = tokens * model.vocabulary * self.logit_bytes // (mesh.tp * mesh.sp)
        off_states, off_weights = strategy.offload != "none", strategy.offload == "parameters"
        optimizer = states.master + states.moments
        # ZeRO-Offload keeps an fp32 copy of the gradients next to the states (arXiv 2101.06840, section 4).
        host = (optimizer + 4 * held if off_states else 0) + (states.weights if off_weights else 0)
        return MemoryBreakdown(
            weights=0 if off_weights else states.weights,
            optimizer=0 if off_states else optimizer,
            gradients=states.gradients,
            buffers=self._buffers([*groups[0], *groups[1]], strategy, mesh),
            activations=round(layer.stored(strategy.recompute) * layers * in_flight(strategy, mesh, stage)),
            working=round(layer.working(strategy.recompute)),
            logits=logits,
            step=0 if off_states else self._step(held, strategy.zero_stage),
            reserve=self.reserve_bytes,
            offload=host,
            pipeline_stage=stage,
        )

    def _buffers(self, tensors: Sequence[Tensors], strategy: Strategy, mesh: Mesh) -> int:
        whole, sizes = whole_elements(tensors), self.buffers
        if strategy.zero_stage == 0:
            # Gradients are flattened into one bucket at a time, unless one rank is all there is.
            return min(whole, sizes.reduce_bucket) * self.dtypes.gradients if mesh.data_size > 1 else 0
        bucket = sizes.reduce_bucket * self.dtypes.gradients
        if strategy.zero_stage < 3:
            return bucket * (2 if strategy.overlaps else 1)
        largest = max((tensors.numel for tensors in tensors), default=0)
        live = max(sizes.max_live, sizes.prefetch + 2 * largest)
        kept = persistent_elements(tensors, mesh.data_size, sizes.persistence_threshold)
        return bucket + min(whole, live + kept) * self.dtypes.weights + largest * self.dtypes.gradients

    def _step(self, partition: int, zero_stage: int) -> int:
        """The fp32 copy of the gradients that the optimizer is given; stage 3 takes one sub-group at a time."""
        if self.dtypes.gradients >= 4 or not self.dtypes.master:
            return 0
        return 4 * (min(partition, self.buffers.sub_group) if zero_stage == 3 else partition)


def persistent_elements(tensors: Sequence[Tensors], ranks: int, threshold: int) -> int:
    """Elements of the parameters that stage 3 keeps gathered, padded to equal parts: those of `threshold` at most."""
    small = [t for t in tensors if t.numel <= threshold]
    return sum(-(-t.numel // ranks) * ranks * t.count for t in small)


Groups = tuple[tuple[Tensors, ...], tuple[Tensors, ...]]


@lru_cache(maxsize=4096)
def _groups(model: ModelShape, mesh: Mesh, stage: int, layers: int) -> Groups:
    """(dense, expert) parameters; DeepSpeed keeps them in separate groups because they are sharded differently."""
    tensors = model.stage_tensors(mesh.tp, mesh.pp, mesh.ep, stage, layers)
    return tuple(t for t in tensors if not t.expert), tuple(t for t in tensors if t.expert)


@lru_cache(maxsize=4096)
def _states(groups: Groups, zero_stage: int, mesh: Mesh, dtypes: Dtypes) -> tuple[StateBytes, int]:
    """(bytes, elements whose optimizer state this rank holds)."""
    found, held = StateBytes(), 0
    for group, ranks in zip(groups, (mesh.data_size, mesh.data_size // mesh.ep), strict=True):
        found += state_bytes([group], zero_stage, ranks, dtypes)
        held += partition_elements(group, zero_stage, ranks)
    return found, held

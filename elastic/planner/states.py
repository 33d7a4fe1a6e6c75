"""Bytes of weights, gradients and optimizer states on one rank, as DeepSpeed 0.19.8 partitions them.

The rules are those of `elastic.core.sharding.zero`, reduced to lengths: stages 1 and 2 cut one flat buffer per group
after padding it to a multiple of 2 x ranks; stage 3 cuts each parameter and rounds each part up. Sources in DeepSpeed:
`zero/stage_1_and_2.py` 430-586, `zero/partition_parameters.py` 1690-1699. Formulas: ZeRO, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.planner.model_shape import Tensors


@dataclass(frozen=True)
class Dtypes:
    """Bytes per parameter. `moments` counts all moments together (Adam has two)."""

    weights: int = 2
    gradients: int = 2
    master: int = 4
    moments: int = 8


BF16_ADAM = Dtypes()
FP32_ADAM = Dtypes(weights=4, gradients=4, master=4, moments=8)
# Megatron-LM accumulates gradients in fp32 (arXiv 2205.05198: 18 bytes per parameter with the fp32 copy of gradients).
MEGATRON_ADAM = Dtypes(weights=2, gradients=4, master=4, moments=8)
PURE_BF16_ADAM = Dtypes(weights=2, gradients=2, master=0, moments=4)
DTYPES = {
    "bf16-adam": BF16_ADAM,
    "fp32-adam": FP32_ADAM,
    "megatron-adam": MEGATRON_ADAM,
    "pure-bf16-adam": PURE_BF16_ADAM,
}


@dataclass(frozen=True)
class StateBytes:
    """One rank's bytes. `gradients` is what is held between two micro-batches of one step."""

    weights: int = 0
    master: int = 0
    moments: int = 0
    gradients: int = 0

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


def whole_elements(group: Iterable[Tensors]) -> int:
    return sum(tensors.numel * tensors.count for tensors in group)


def partition_elements(group: Sequence[Tensors], zero_stage: int, ranks: int) -> int:
    """Elements of one parameter group whose optimizer state one of `ranks` ranks holds, padding included."""
    if zero_stage == 3:
        return sum(-(-tensors.numel // ranks) * tensors.count for tensors in group)
    whole = whole_elements(group)
    return -(-whole // (2 * ranks)) * 2 if zero_stage else whole


def state_bytes(groups: Iterable[Sequence[Tensors]], zero_stage: int, ranks: int, dtypes: Dtypes) -> StateBytes:
    """Bytes of one rank for the optimizer's parameter groups, each sharded over `ranks` ranks.

    Training in fp32 keeps no master copy at stage 0; at stages 1 to 3 DeepSpeed clones the partition even then.
    """
    return sum((_group_bytes(group, zero_stage, ranks, dtypes) for group in groups if group), StateBytes())


def _group_bytes(group: Sequence[Tensors], zero_stage: int, ranks: int, dtypes: Dtypes) -> StateBytes:
    part, whole = partition_elements(group, zero_stage, ranks), whole_elements(group)
    weights = (whole, part * ranks, part * ranks, part)[zero_stage]
    # Stage 1 accumulates whole gradients and reduces them once per step; stages 2 and 3 keep the reduced part only.
    gradients = (whole, whole, part, part)[zero_stage]
    cloned = zero_stage > 0 or dtypes.weights < 4
    return StateBytes(
        weights=weights * dtypes.weights,
        master=part * dtypes.master if cloned else 0,
        moments=part * dtypes.moments,
        gradients=gradients * dtypes.gradients,
    )

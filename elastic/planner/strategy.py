"""What the planner chooses: a mesh (how many ranks along each axis) and a strategy (how each rank trains)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic.core.errors import UsageError

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer", "parameters")


@dataclass(frozen=True, order=True)
class Mesh:
    """Ranks along each axis; world size = dp x sp x tp x pp. `ep` divides dp x sp: expert groups lie inside them.

    Neighbouring ranks differ first in tp, then sp, then dp, then pp, as in DeepSpeed's and Megatron's topologies.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis, size in vars(self).items():
            if size < 1:
                raise UsageError(f"mesh: {axis} must be at least 1, not {size}")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.sp

    @property
    def data_size(self) -> int:
        """Ranks over which DeepSpeed shards dense parameters: data parallel times sequence parallel."""
        return self.dp * self.sp

    def group(self, axis: str) -> tuple[int, int]:
        """(ranks in a group of `axis`, distance between neighbours of the group); "dp" is dp and sp together."""
        if axis == "tp":
            return self.tp, 1
        if axis == "pp":
            return self.pp, self.tp * self.data_size
        return {"sp": self.sp, "ep": self.ep, "dp": self.data_size}[axis], self.tp

    def __str__(self) -> str:
        return " ".join(f"{axis}{size}" for axis, size in vars(self).items() if size > 1) or "dp1"


@dataclass(frozen=True, order=True)
class Strategy:
    """How a rank trains. `micro_batch` counts samples per data-parallel rank and pass, `global_batch` per step.

    `zero_stage`: DeepSpeed's. `virtual_stages` > 1: Megatron's interleaved schedule. `sequence_parallel`: Megatron's,
    inside tp. `overlap`: communication of dp concurrently with the backward pass; None is DeepSpeed's default
    (on for stage 3 only). `scatter_gather`: pipeline messages are cut over tp (Megatron), DeepSpeed sends them whole.
    """

    zero_stage: int = 0
    global_batch: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    offload: Offload = "none"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    overlap: bool | None = None
    scatter_gather: bool = False

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise UsageError(f"strategy: zero_stage must be 0, 1, 2 or 3, not {self.zero_stage}")
        if self.recompute not in RECOMPUTE:
            raise UsageError(f"strategy: recompute must be one of {', '.join(RECOMPUTE)}, not {self.recompute!r}")
        if self.offload not in OFFLOAD:
            raise UsageError(f"strategy: offload must be one of {', '.join(OFFLOAD)}, not {self.offload!r}")
        if min(self.global_batch, self.micro_batch, self.virtual_stages) < 1:
            raise UsageError("strategy: global_batch, micro_batch and virtual_stages must be at least 1")

    def micro_steps(self, mesh: Mesh) -> int:
        """Passes of one rank per step. The last one may be smaller where the batch does not divide."""
        return -(-self.global_batch // (mesh.dp * self.micro_batch))

    @property
    def overlaps(self) -> bool:
        return self.zero_stage == 3 if self.overlap is None else self.overlap

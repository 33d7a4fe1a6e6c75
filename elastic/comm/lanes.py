"""Verdicts over all ranks where the ranks hold different slices of the model's layers (`core.mesh`: lanes), have
different experts, or train in islands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic.checkpoint.shares import Apart
from elastic.comm.agreement import Agreement
from elastic.core.errors import IntegrityError
from elastic.core.mesh import Mesh
from elastic.core.sharding.experts import neighbours

# Says nothing where the least of several numbers is sought.
_NEUTRAL = (1 << 63) - 1


@dataclass(frozen=True)
class Lanes:
    """`every` is the agreement of all ranks, `own` that of the ranks with the same slices and layers as this one, lane
    `index` of `count`. With one lane they are one. `stages` lanes have layers of their own, under the names of the
    whole model; `slices` lanes have slices of the same layers, and are neighbours."""

    every: Agreement
    own: Agreement
    count: int = 1
    index: int = 0
    axis: str = "tensor"
    stages: int = 1
    slices: int = 1

    @classmethod
    def of_copies(
        cls, copies: dist.ProcessGroup, lanes: Lanes, device: torch.device, shard: int | None = None
    ) -> Lanes:
        """Of ranks that share experts, or have shards of all that their stage has: this one has `shard`. `copies` is
        the group of those with the same ones as this, of whom some may be neighbours. Not collective."""
        every, own = lanes.every, Agreement(copies, device)
        count = every.world_size // own.world_size
        if shard is None:
            return cls(every, own, count, every.rank // neighbours(own.ranks) % count, "expert")
        axis = "shard" if lanes.stages == 1 else "pipeline and shard"
        return cls(every, own, count, lanes.stage * (count // lanes.stages) + shard, axis)

    @classmethod
    def of_cells(cls, cell: dist.ProcessGroup, lanes: Lanes, device: torch.device) -> Lanes:
        """Of ranks that have slices of their own of each layer, and the same part of what is not sliced: this one and
        the others of `cell`, its neighbours. Not collective."""
        shards, own = lanes.own.world_size, Agreement(cell, device)
        axis = "shard" if lanes.stages == 1 else "pipeline and shard"
        return cls(lanes.every, own, lanes.stages * shards, lanes.stage * shards + lanes.own.rank, axis)

    @classmethod
    def of_islands(cls, apart: Apart, every: Agreement, device: torch.device) -> Lanes:
        """Of ranks that train in islands. Not collective."""
        return cls(every, Agreement(apart.group, device), apart.count, apart.index, "island")

    @classmethod
    def of(cls, data_group: dist.ProcessGroup, device: torch.device, mesh: Mesh | None = None) -> Lanes:
        """`data_group` is that of this rank's lane: of the ranks with the same slices of the layers, in the same stage.
        Not collective."""
        own = Agreement(data_group, device)
        if mesh is None or mesh.lanes == 1:
            return cls(own, own)
        assert dist.group.WORLD is not None
        every, tp, pp = Agreement(dist.group.WORLD, device), mesh.tp, mesh.pp
        axis = "tensor" if pp == 1 else "pipeline" if tp == 1 else "pipeline and tensor"
        return cls(every, own, mesh.lanes, mesh.lane(every.rank), axis, pp, tp)

    @property
    def leads(self) -> bool:
        """Is this rank the first one of its lane?"""
        return self.own.rank == 0

    @property
    def slice(self) -> int:
        """Which of the slices this rank has."""
        return self.index % self.slices

    @property
    def stage(self) -> int:
        """Which of the stages this rank has."""
        return self.index // self.slices

    def low_and_high(self, everywhere: int, fingerprint: int) -> list[int]:
        """Numbers whose least over all ranks `require_equal` understands, of the fingerprint of what all ranks have
        copies of, and of what those of this lane have: lanes' fingerprints do not meet."""
        found = [_NEUTRAL] * (2 * self.count)
        found[2 * self.index : 2 * self.index + 2] = fingerprint, -fingerprint
        return [everywhere, -everywhere, *found]

    def require_equal(self, least: Sequence[int], difference: Callable[[Agreement, bool], IntegrityError]) -> None:
        """Raises IntegrityError on all ranks where copies differ; then `difference` is asked by the ranks that have
        them, and may be collective over them. Its second argument: of what all ranks have, not this lane alone?"""
        differ = [low != -high for low, high in zip(least[::2], least[1::2], strict=True)]
        if differ[0]:
            raise difference(self.every, True)
        apart = [lane for lane, unequal in enumerate(differ[1:]) if unequal]
        if self.index in apart:
            raise difference(self.own, False)
        if apart:
            raise IntegrityError(
                f"the copies of one state have drifted apart between the ranks with {self.axis} coordinate {apart[0]}: "
                "their own error says what differs"
            )

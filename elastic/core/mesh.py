"""The ranks of a generation as a grid: which of them compute on the same samples, each on its part of the sequence.

A *cell* is the smallest group of ranks that trains on samples of its own. Samples are dealt to cells, and world sizes
are whole cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core.errors import UsageError


@dataclass(frozen=True)
class MeshSettings:
    """How many workers form a cell: `sp` share each sequence. Fixed for a run, as dropout depends on it.

    `rounded` says in words what became of worker counts that were not whole cells.
    """

    sp: int = 1
    rounded: str = ""

    @property
    def cell(self) -> int:
        return self.sp

    def __str__(self) -> str:
        return f"mesh: {{sp: {self.sp}}}"


@dataclass(frozen=True)
class Mesh:
    """`dp` cells of `sp` ranks, which are neighbours: rank = data coordinate * sp + sequence coordinate."""

    dp: int
    sp: int = 1

    @classmethod
    def of(cls, world_size: int, sp: int) -> Mesh:
        """Raises UsageError for a world of other than whole cells."""
        if sp < 1 or world_size % sp:
            raise UsageError(f"{world_size} ranks are not whole cells of {sp} (mesh: {{sp: {sp}}})")
        return cls(world_size // sp, sp)

    def data(self, rank: int) -> int:
        """The cell of a rank: the coordinate by which samples are dealt."""
        return rank // self.sp

    def sequence(self, rank: int) -> int:
        """Which part of each sequence the rank has."""
        return rank % self.sp

    def cell(self, rank: int) -> range:
        """The ranks that share their sequences with `rank`, itself included."""
        first = self.data(rank) * self.sp
        return range(first, first + self.sp)

    @property
    def axes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "sp": self.sp}

    def coordinates(self, rank: int) -> Mapping[str, int]:
        return {"dp": self.data(rank), "sp": self.sequence(rank)}


def whole_cells(workers: int, cell: int) -> int:
    """The largest number of workers up to `workers` that is a multiple of `cell`."""
    return workers // cell * cell

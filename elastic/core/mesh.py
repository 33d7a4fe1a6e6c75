"""The ranks of a generation as a grid: which of them compute on the same samples, each its part of the work.

A *cell* is the smallest group of ranks that trains on samples of its own: it shares sequences (`sp`), or the model's
layers (`tp`). Samples are dealt to cells, and world sizes are whole cells. A *lane* is what the ranks with one tensor
coordinate are together: they hold the same slices of the model's layers, and are a data-parallel world of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core.errors import UsageError


@dataclass(frozen=True)
class MeshSettings:
    """How many workers form a cell: `sp` share each sequence, or `tp` each layer. Fixed for a run: dropout depends on
    it, and so does what is saved with `tp`.

    `rounded` says in words what became of worker counts that were not whole cells.
    """

    sp: int = 1
    rounded: str = ""
    tp: int = 1

    @property
    def cell(self) -> int:
        return self.sp * self.tp

    def __str__(self) -> str:
        return described(self.sp, self.tp)


@dataclass(frozen=True)
class Mesh:
    """`dp` cells, whose ranks are neighbours: rank = (data coordinate * sp + sequence coordinate) * tp + tensor
    coordinate."""

    dp: int
    sp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, world_size: int, sp: int = 1, tp: int = 1) -> Mesh:
        """Raises UsageError for a world of other than whole cells."""
        if sp < 1 or tp < 1 or world_size % (sp * tp):
            raise UsageError(f"{world_size} ranks are not whole cells of {sp * tp} ({described(sp, tp)})")
        return cls(world_size // (sp * tp), sp, tp)

    @property
    def per_cell(self) -> int:
        """How many ranks train on the same samples."""
        return self.sp * self.tp

    def data(self, rank: int) -> int:
        """The cell of a rank: the coordinate by which samples are dealt."""
        return rank // self.per_cell

    def sequence(self, rank: int) -> int:
        """Which part of each sequence the rank has."""
        return rank // self.tp % self.sp

    def tensor(self, rank: int) -> int:
        """Which slices of the layers the rank has: its lane."""
        return rank % self.tp

    def cell(self, rank: int) -> range:
        """The ranks that train on the same samples as `rank`, itself included."""
        first = self.data(rank) * self.per_cell
        return range(first, first + self.per_cell)

    @property
    def axes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "sp": self.sp, "tp": self.tp}

    def coordinates(self, rank: int) -> Mapping[str, int]:
        return {"dp": self.data(rank), "sp": self.sequence(rank), "tp": self.tensor(rank)}


def described(sp: int, tp: int) -> str:
    """As a job file says it."""
    axes = [f"{name}: {size}" for name, size in (("sp", sp), ("tp", tp)) if size != 1]
    return f"mesh: {{{', '.join(axes)}}}"


def whole_cells(workers: int, cell: int) -> int:
    """The largest number of workers up to `workers` that is a multiple of `cell`."""
    return workers // cell * cell

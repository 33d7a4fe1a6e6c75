"""The ranks of a generation as a grid: which of them compute on the same samples, each its part of the work.

A *cell* is the smallest number of neighbouring ranks that a world is made of: they share sequences (`sp`), each of the
model's layers (`tp`), the layers among them (`pp`, stages of a pipeline), or its experts (`ep`). Samples are dealt to
the cells of `sp`, `tp` and `pp`, whose ranks compute on the same ones; with `ep` each rank has samples of its own. A
*lane* is what the ranks with one tensor coordinate, or of one stage, are together: they hold the same slices of the
model's layers, or the same layers, and are a data-parallel world of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from elastic.core.errors import UsageError

# What is not the same with another number of ranks that share each layer.
DRAWN_ANEW = "dropout inside layers that are cut is drawn anew"


@dataclass(frozen=True)
class MeshSettings:
    """How many workers form a cell: `sp` share each sequence, `tp` each layer, `ep` the experts, or `pp` the layers, in
    stages. `sp` is fixed for a run: dropout depends on it. It depends on `tp`, too, inside the layers that are cut.

    `rounded` says in words what became of worker counts that were not whole cells. `choices` are the sizes of axes that
    may change from one generation to the next (`sharding.mesh_policy`); the axis itself then has the largest of them.
    `any_tp`: those of `tp` are all that there could be, and the model says which it cannot be cut by.
    `stages_per_rank`: how many stages of a pipeline the engine was told to give each rank.
    """

    sp: int = 1
    rounded: str = ""
    tp: int = 1
    ep: int = 1
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pp: int = 1
    stages_per_rank: int = 1
    any_tp: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", {axis: tuple(sizes) for axis, sizes in self.choices.items()})

    def shape(self, axes: Mapping[str, int]) -> MeshSettings:
        """These settings with one size for each axis."""
        sizes: dict[str, Any] = dict(axes)
        return replace(self, choices={}, rounded="", **sizes)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """By how many ranks each layer may be shared."""
        return self.choices.get("tp", (self.tp,))

    @property
    def ep_sizes(self) -> tuple[int, ...]:
        """By how many ranks the experts may be shared."""
        return self.choices.get("ep", (self.ep,))

    @property
    def unlike(self) -> str:
        """What is not the same in all generations of a run, in words; empty: nothing."""
        return f"mesh.tp may change within the run: {DRAWN_ANEW} then" if len(self.tp_sizes) > 1 else ""

    def mesh(self, world_size: int) -> Mesh:
        """Of settings with one size for each axis. Raises UsageError for a world of other than whole cells."""
        return Mesh.of(world_size, self.sp, self.tp, self.ep, self.pp)

    @property
    def axes(self) -> tuple[Mapping[str, int], ...]:
        """Every combination of the sizes of the axes that may change; one empty one where none may."""
        return tuple(dict(zip(self.choices, sizes, strict=True)) for sizes in product(*self.choices.values()))

    def shared(self, axes: Mapping[str, int], world_size: int) -> Mapping[str, int]:
        """The mesh of a generation, by axis; empty where its ranks share nothing, or there are none."""
        sizes = {axis: size for axis, size in self.shape(axes).mesh(world_size).axes.items() if size != 1}
        return sizes if world_size and sizes.keys() - {"dp"} else {}

    @property
    def cells(self) -> tuple[int, ...]:
        """The sizes of cells, one of which a world is made of."""
        return tuple(sorted({self.shape(axes).cell for axes in self.axes})) if self.choices else (self.cell,)

    @property
    def cell(self) -> int:
        return self.sp * self.tp * self.ep * self.pp

    @property
    def readers(self) -> int:
        """How many workers train on the same samples."""
        return self.sp * self.tp * self.pp

    def __str__(self) -> str:
        if self.choices:
            given = {"sp": self.sp, "tp": self.tp, "ep": self.ep, "pp": self.pp}
            fixed = {axis: size for axis, size in given.items() if size != 1}
            said: dict[str, Any] = fixed | {axis: list(sizes) for axis, sizes in self.choices.items()}
            if self.any_tp:
                said["tp"] = "any"
            return f"mesh: {{{', '.join(f'{axis}: {sizes}' for axis, sizes in said.items())}}}"
        return described(self.sp, self.tp, self.ep, self.pp)


@dataclass(frozen=True)
class Mesh:
    """rank = ((data coordinate * pp + stage) * sp + sequence coordinate) * tp + tensor coordinate. Experts are shared
    along the data axis, as in DeepSpeed: expert coordinate = data coordinate modulo `ep`; ranks that share layers, too,
    divide the experts further. The stages of a pipeline are
    neighbours, unlike in DeepSpeed's own topology: a lost node then takes the fewest pipelines with it."""

    dp: int
    sp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    @classmethod
    def of(cls, world_size: int, sp: int = 1, tp: int = 1, ep: int = 1, pp: int = 1) -> Mesh:
        """Raises UsageError for a world of other than whole cells."""
        cell = sp * tp * ep * pp
        if min(sp, tp, ep, pp) < 1 or world_size % cell:
            raise UsageError(f"{world_size} ranks are not whole cells of {cell} ({described(sp, tp, ep, pp)})")
        return cls(world_size // (sp * tp * pp), sp, tp, ep, pp)

    @property
    def per_cell(self) -> int:
        """How many ranks train on the same samples: those that share sequences, or layers."""
        return self.sp * self.tp * self.pp

    @property
    def lanes(self) -> int:
        """How many data-parallel worlds hold parts of the model."""
        return self.tp * self.pp

    def data(self, rank: int) -> int:
        """The coordinate by which samples are dealt."""
        return rank // self.per_cell

    def sequence(self, rank: int) -> int:
        """Which part of each sequence the rank has."""
        return rank // self.tp % self.sp

    def tensor(self, rank: int) -> int:
        """Which slices of the layers the rank has: its lane."""
        return rank % self.tp

    def stage(self, rank: int) -> int:
        """Which of the layers the rank has: its lane."""
        return rank // (self.sp * self.tp) % self.pp

    def expert(self, rank: int) -> int:
        """Which part of each layer's experts the rank has."""
        return self.data(rank) % self.ep

    def lane(self, rank: int) -> int:
        """Which part of the model the rank's lane has: stage * tp + tensor coordinate."""
        return self.stage(rank) * self.tp + self.tensor(rank)

    def along(self, axis: str, rank: int) -> range:
        """The ranks that share sequences ("sp"), each layer ("tp") or the layers ("pp") with `rank`, itself included:
        those that differ from it in that coordinate alone."""
        step = {"tp": 1, "sp": self.tp, "pp": self.sp * self.tp}[axis]
        first = rank - self.coordinates(rank)[axis] * step
        return range(first, first + self.axes[axis] * step, step)

    def cell(self, rank: int) -> range:
        """The ranks that train on the same samples as `rank`, itself included."""
        first = self.data(rank) * self.per_cell
        return range(first, first + self.per_cell)

    def part(self, rank: int) -> tuple[int, int, int, int]:
        """(lane, lanes, place, places): what the rank has is that place of that lane; experts, slices, or stages are
        lanes."""
        # All at once: it is asked for every rank of every mesh that may come next.
        sp, tp, ep = self.sp, self.tp, self.ep
        pipeline, tensor = divmod(rank, tp)
        pipeline, sequence = divmod(pipeline, sp)
        data, stage = divmod(pipeline, self.pp)
        lane, lanes = stage * tp + tensor, self.pp * tp
        if ep == 1:
            return lane, lanes, data * sp + sequence, self.dp * sp
        # The experts of a lane's slices are most of what it has.
        share, expert = divmod(data, ep)
        return lane * ep + expert, lanes * ep, share * sp + sequence, self.dp * sp // ep

    def same_share(self, rank: int, other: int) -> bool:
        """Do both do the same part of a cell's work: compute with the same layers, experts and parts of sequences?"""
        mine, others = self.coordinates(rank), self.coordinates(other)
        return all(mine[axis] == others[axis] for axis in mine if axis != "dp")

    @property
    def axes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "sp": self.sp, "tp": self.tp, "ep": self.ep, "pp": self.pp}

    def coordinates(self, rank: int) -> Mapping[str, int]:
        return {
            "dp": self.data(rank),
            "sp": self.sequence(rank),
            "tp": self.tensor(rank),
            "ep": self.expert(rank),
            "pp": self.stage(rank),
        }


def described(sp: int, tp: int, ep: int = 1, pp: int = 1) -> str:
    """As a job file says it."""
    given = {"sp": sp, "tp": tp, "ep": ep, "pp": pp}
    axes = [f"{name}: {size}" for name, size in given.items() if size != 1]
    return f"mesh: {{{', '.join(axes)}}}"


def whole_cells(workers: int, *cells: int) -> int:
    """The largest number of workers up to `workers` that is a multiple of one of `cells`."""
    return max(workers // cell * cell for cell in cells)

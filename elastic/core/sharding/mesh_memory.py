"""What memory a mesh would need, predicted from what other meshes of the run were measured to need. Bytes; pure.

The peak of a rank is the training state that it holds, and the rest. The state (weights, gradients, masters, optimizer
state) follows from the tensors' shapes and from how the engine shares them out, for every mesh: exactly but for padding
and, of ZeRO 2, whole gradients of tensors at the ends of a partition, which are bounded. The rest (activations,
gathered weights, buckets, what a reduction or a step copies, libraries) was measured, and is carried over under these
assumptions:

- The micro-batch and the length of sequences stay what they are, so that with the same axes it does not depend on the
  number of workers.
- With fewer slices of layers, stages or parts of experts it grows in proportion, as if all of it lay in what is cut: at
  most that, since norms, inputs and what libraries have do not grow.
- With more of them it shrinks by nothing. 1F1B has as many micro-batches under way as there are stages, each of fewer
  layers; GPipe has all of a step's, of fewer layers; tokens are taken to be spread evenly over the experts.

Not foreseen: memory that fragments, later micro-batches that are larger than the first, snapshots' copies of the state
in host memory, stages that a script cuts otherwise than by numbers of parameters.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, MeshSettings
from elastic.core.sharding.stages import balanced, holders, stages_that_fit
from elastic.core.typed_json import decode

# Measured meshes that are kept.
_KEPT = 100
_GIB = 1 << 30

# How a rank's part of a lane's tensors is cut: not at all; a parameter group as one flat, by elements (ZeRO 1 and 2);
# each tensor by elements (ZeRO 3); each tensor by rows (FSDP2).
CutBy = Literal["whole", "flat", "elements", "rows"]


class HeldTensors(NamedTuple):
    """Tensors of the training state that are alike: `rows` x `width` elements each before anything cuts them, `number`
    of them in each of `layers` layers of a pipeline from `layer` on, or of no pipeline.

    Of each element every rank of a lane has `lane_bytes`, and one rank of those that share the data has `data_bytes`.
    Where a parameter group is one flat, each rank with any of a tensor's elements has `reached_bytes` of all of them.
    `cut`: of what lanes have slices, along the rows (0) or the width (1); -1: each has it whole. `experts`: 1 where the
    rows are experts that ranks share, 2 where each tensor is one. `group`: the optimizer's, -1 for what is not trained.
    `also`: other layers that have the very same tensor. Where the gradients of several micro-batches are added up
    before they are reduced, every rank of a lane has `summed_bytes` of each element until then, in the place of the
    `reduced_bytes` that are in `data_bytes`.
    """

    rows: int
    width: int
    number: int = 1
    lane_bytes: int = 0
    data_bytes: int = 0
    cut: int = -1
    experts: int = 0
    group: int = -1
    layer: int = 0
    layers: int = 1
    also: tuple[int, ...] = ()
    reached_bytes: int = 0
    summed_bytes: int = 0
    reduced_bytes: int = 0


@dataclass(frozen=True)
class HeldState:
    """The training state of a whole model. `shard_workers`: so many ranks of a stage have it once (HSDP; 0: all).
    `slices`: with how many slices of each layer it was looked at; with one nobody knows what would be cut. `passes`:
    the micro-batches of a step, or, where the global batch follows the number of workers, `micro_steps`: those of each
    rank."""

    cut_by: CutBy
    tensors: tuple[HeldTensors, ...]
    shard_workers: int = 0
    slices: int = 1
    passes: int = 1
    micro_steps: int = 0

    @classmethod
    def of(cls, parts: Sequence[HeldState]) -> HeldState:
        """One of several, of other stages each."""
        return replace(parts[0], tensors=together(tensors for part in parts for tensors in part.tensors))

    @property
    def axes_known(self) -> frozenset[str]:
        """Along which it was seen to be shared."""
        found = {"tp"} if self.slices > 1 else set()
        return frozenset(found | ({"ep"} if any(tensors.experts for tensors in self.tensors) else set()))


@dataclass(frozen=True)
class MeshMemory:
    """What the fullest rank of a mesh was measured to need besides the state."""

    world_size: int
    axes: Mapping[str, int]
    rest_bytes: int


@dataclass(frozen=True)
class KnownMemory:
    """`limit_bytes`: what a worker has, without what others use of it."""

    limit_bytes: int = 0
    held: HeldState | None = None
    meshes: tuple[MeshMemory, ...] = ()

    def measured(self, found: MeshMemory, limit_bytes: int, held: HeldState) -> KnownMemory:
        others = [one for one in self.meshes if (one.world_size, one.axes) != (found.world_size, found.axes)]
        # The model stays the same, and what lanes cut of it is known where they have cut it.
        knows_more = self.held is not None and held.axes_known < self.held.axes_known
        return KnownMemory(limit_bytes, self.held if knows_more else held, (*others[1 - _KEPT :], found))

    def fitted(self, world_size: int, axes: Mapping[str, int]) -> bool:
        """Whether this mesh was measured, or one with the same axes and no more workers."""
        return any(one.axes == axes and one.world_size <= world_size for one in self.meshes)


@dataclass(frozen=True)
class MemoryNeed:
    """Of the fullest rank of a mesh."""

    state_bytes: int
    rest_bytes: int
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + self.rest_bytes

    @property
    def suffices(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def __str__(self) -> str:
        return f"{_gib(self.peak_bytes)} of {_gib(self.limit_bytes)} GiB, {_gib(self.state_bytes)} of it training state"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}" if size >= _GIB else f"{size / _GIB:.3f}"


def predict(known: KnownMemory, settings: MeshSettings, axes: Mapping[str, int], world_size: int) -> MemoryNeed | None:
    """What the fullest rank of this mesh would need; None where too little was measured to say.

    From what was measured with the same axes, of several the most; else from whatever promises the least, for each of
    the others is a bound.
    """
    held = known.held
    shared = {axis for axis in ("tp", "ep") if axes.get(axis, 1) > 1}
    if held is None or not known.meshes or not shared <= held.axes_known:
        return None
    try:
        state = state_bytes(held, settings.shape(axes), world_size)
    except UsageError:
        # Fewer layers than stages, as far as is known: the engine will say so.
        return None
    same = [one.rest_bytes for one in known.meshes if one.axes == axes]
    rest = max(same) if same else min(math.ceil(one.rest_bytes * growth(one.axes, axes)) for one in known.meshes)
    return MemoryNeed(state, rest, known.limit_bytes)


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """By how much what is no state may grow: old slices, stages and parts of experts by new ones, where there are
    fewer."""
    return math.prod(max(1.0, before.get(axis, 1) / after.get(axis, 1)) for axis in ("tp", "pp", "ep"))


# --- the training state ---


def state_bytes(held: HeldState, shape: MeshSettings, world_size: int) -> int:
    """Of the rank that has most; a bound where tensors have `reached_bytes`. `shape` has one size for each axis. Raises
    UsageError where the model has fewer layers than stages."""
    mesh = shape.mesh(world_size)
    summed = adds_up(mesh.pp, held.micro_steps or -(-held.passes // (world_size // shape.readers)))
    return max(_rank_bytes(held, tensors, mesh, summed) for tensors in _by_rank(held.tensors, shape))


def adds_up(pp: int, micro_steps: int) -> bool:
    """Are there gradients of several micro-batches before they are reduced? A pipeline reduces them after its last."""
    return pp > 1 or micro_steps > 1


def _by_rank(tensors: Sequence[HeldTensors], shape: MeshSettings) -> Iterator[list[tuple[HeldTensors, int]]]:
    """What each rank of a pipeline has layers of, with how many: stages are cut as the engines do by default."""
    if shape.pp == 1:
        yield [(each, each.layers) for each in tensors]
        return
    own = _layers_by_rank(tuple(tensors), shape.pp, shape.stages_per_rank)
    where = [(each, frozenset(_layers(each))) for each in tensors]
    for layers_of_rank in own:
        found = [(each, len(layers_of_rank & layers)) for each, layers in where]
        yield [(each, min(layers, 1) if each.also else layers) for each, layers in found if layers]


@lru_cache(maxsize=256)
def _layers_by_rank(tensors: tuple[HeldTensors, ...], pp: int, stages_per_rank: int) -> tuple[frozenset[int], ...]:
    costs, trained = Counter[int](), set[int]()
    for each in tensors:
        layers = _layers(each)
        costs.update(dict.fromkeys(layers, each.rows * each.width * each.number))
        trained |= set(layers) if each.group >= 0 else set()
    count = max(costs) + 1
    by_rank = holders(pp, stages_that_fit(stages_per_rank, pp, len(trained)))
    begins = balanced([costs[n] for n in range(count)], [n in trained for n in range(count)], len(by_rank))
    own: dict[int, set[int]] = {}
    for begin, end, rank in zip(begins, (*begins[1:], count), by_rank, strict=True):
        own.setdefault(rank, set()).update(range(begin, end))
    return tuple(map(frozenset, own.values()))


def _layers(tensors: HeldTensors) -> tuple[int, ...]:
    return (*range(tensors.layer, tensors.layer + tensors.layers), *tensors.also)


def _rank_bytes(held: HeldState, tensors: Iterable[tuple[HeldTensors, int]], mesh: Mesh, summed: bool) -> int:
    total, flats = 0, Counter[tuple[int, bool, int]]()
    reached = defaultdict[tuple[int, bool, int], Counter[int]](Counter)
    for each, layers in tensors:
        rows, width, count = _slice(each, mesh)
        count *= layers
        total += rows * width * count * each.lane_bytes
        ranks = _ranks(held, mesh, experts=each.experts > 0)
        match held.cut_by:
            case "whole":
                total += rows * width * count * each.data_bytes
            case "flat":
                flats[each.group, each.experts > 0, each.data_bytes] += rows * width * count
                if each.reached_bytes:
                    reached[each.group, each.experts > 0, each.reached_bytes][rows * width] += count
            case "elements":
                total += -(-rows * width // ranks) * count * each.data_bytes
            case "rows":
                part = -(-rows // ranks) * width
                total += part * count * each.data_bytes
                if summed:
                    total += max(0, rows * width * each.summed_bytes - part * each.reduced_bytes) * count
    for (_, experts, size), elements in flats.items():
        total += _part(elements, _ranks(held, mesh, experts)) * size
    for (_, experts, size), numels in reached.items():
        total += _reached(numels, _ranks(held, mesh, experts)) * size
    return total


def _part(elements: int, ranks: int) -> int:
    """Partitions begin on an even element: see `sharding.zero`."""
    return 2 * -(-elements // (2 * ranks))


def _reached(numels: Counter[int], ranks: int) -> int:
    """At most so many elements have the tensors that a partition has any of, with its padding, by how many there are of
    each size: its own elements, and all but one of a tensor at either end. Which lie at its ends the order of tensors
    would say."""
    part = _part(sum(numel * count for numel, count in numels.items()), ranks)
    largest = (numel for numel in sorted(numels, reverse=True) for _ in range(numels[numel]))
    return min(part * ranks, part + sum(max(0, numel - 1) for numel in islice(largest, 2)))


def _slice(each: HeldTensors, mesh: Mesh) -> tuple[int, int, int]:
    """(rows, width, count) of the largest that a lane has; of experts those of one rank of it."""
    rows = -(-each.rows // (mesh.tp if each.cut == 0 else 1))
    width = -(-each.width // (mesh.tp if each.cut == 1 else 1))
    if each.experts == 2:
        return rows, width, -(-each.number // mesh.ep)
    return (-(-rows // mesh.ep) if each.experts else rows), width, each.number


def _ranks(held: HeldState, mesh: Mesh, experts: bool) -> int:
    """Over how many ranks what a lane has is cut."""
    ranks, cell = mesh.dp * mesh.sp, mesh.tp
    if held.shard_workers and ranks * cell > held.shard_workers and ranks * cell % held.shard_workers == 0:
        ranks = held.shard_workers // cell
    return max(1, ranks // mesh.ep) if experts else ranks


def together(tensors: Iterable[HeldTensors]) -> tuple[HeldTensors, ...]:
    """Those that are alike as one, also in neighbouring layers."""
    counts = Counter[HeldTensors]()
    for each in tensors:
        for layer in range(each.layer, each.layer + each.layers):
            counts[each._replace(number=1, layer=layer, layers=1)] += each.number
    found: list[HeldTensors] = []
    for each in sorted(counts, key=lambda one: (one._replace(layer=0), counts[one], one.layer)):
        last = found[-1] if found else None
        joined = None if last is None or each.also else last._replace(layers=1, number=1, layer=each.layer)
        if (
            last is not None
            and joined == each
            and last.layer + last.layers == each.layer
            and last.number == counts[each]
        ):
            found[-1] = last._replace(layers=last.layers + 1)
        else:
            found.append(each._replace(number=counts[each]))
    return tuple(found)


# --- what workers report ---


@dataclass
class MemoryReports:
    """Of the ranks of a generation, until all have come."""

    _generation: int = -1
    _told: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def add(self, told: Mapping[str, Any]) -> tuple[int, int, HeldState] | None:
        """`told` by one rank: "generation", "rank", "world_size", "limit_bytes", "peak_bytes", "state_bytes" and, by
        one rank of each stage, "held", a HeldState as JSON (else None). With the last rank's report: (limit, most
        besides the state, the state of the whole model)."""
        if told["generation"] != self._generation:
            self._generation, self._told = told["generation"], {}
        self._told[told["rank"]] = told
        if len(self._told) < told["world_size"]:
            return None
        ranks = [self._told[rank] for rank in sorted(self._told)]
        rest = max(max(0, one["peak_bytes"] - one["state_bytes"]) for one in ranks)
        held = HeldState.of([decode(HeldState, one["held"]) for one in ranks if one["held"] is not None])
        self._told = {}
        return min(one["limit_bytes"] for one in ranks), rest, held

"""An optimizer's step on whole tensors: Muon orthogonalises matrices, LAMB takes the norm of each tensor.

Each tensor has an owner among the ranks that have shards of it. There it is put together, with its gradient and its
optimizer state, the optimizer makes its own step on it, and each rank is given its shard back. So a step is the one
that a single process makes, bit for bit, at any number of ranks; each tensor is computed once; and state stays sharded.
What is under way is a few tensors for each owner, not a model.

Where a tensor has no state yet, nobody but its owner would know what the optimizer keeps of it: in that step all ranks
compute it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.meshes import COPIES, EXPERTS, over_cell
from elastic.engines.fsdp2.update.stand_ins import StandIn, is_sharded, local_of, marked, put, standing_in
from elastic.engines.optimizer_state import not_elementwise

# What an owner has of others at once, unless a single tensor is larger.
_ROUND_BYTES = 64 << 20
# Any type's values begin at a multiple of it.
_ALIGNED = 16

# The axis of a mesh that has but one, and no name for it.
_ONLY = "dp"

Box = tuple[slice, ...]
Ends = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """What `ranks` have of a tensor, each all of it; the first of them gives it."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Tensor:
    """One parameter: in which group it is, its parts, and on which ranks it is stepped."""

    parameter: DTensor
    group: int
    parts: tuple[Part, ...]
    computed_by: tuple[int, ...]
    begun: bool

    def part_of(self, rank: int) -> Part:
        return next(part for part in self.parts if rank in part.ranks)


class WholeStep:
    """Of the parameters in some groups of one optimizer. Ranks of one stage call it together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[int],
        device: torch.device,
        stage: dist.ProcessGroup,
        all_to_all: Callable[..., Any],
    ) -> None:
        """`stage`: all ranks that have shards of the optimizer's parameters, or of other layers' slices."""
        self._optimizer, self._groups = optimizer, frozenset(groups)
        self._device, self._stage, self._all_to_all = device, stage, all_to_all
        self._ranks = dist.get_process_group_ranks(stage)
        self._rank = dist.get_rank()
        self._begun: set[int] = set()

    @torch.no_grad()
    def step(self) -> None:
        """Collective over the stage."""
        for tensors in self._by_ranks():
            for now in _rounds(tensors):
                self._step(now)
                self._begun.update(id(tensor.parameter) for tensor in now)

    def _by_ranks(self) -> list[list[_Tensor]]:
        """Those that lie over as many ranks together: what lies over one lane alone, each lane has by itself, and no
        rank sees how others deal out theirs. Owners and order are the same on all ranks of a tensor."""
        found: dict[int, list[_Tensor]] = {}
        work: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for number in sorted(self._groups):
            for parameter in self._optimizer.param_groups[number]["params"]:
                if parameter.requires_grad:
                    parts = parts_of(parameter)
                    ranks = sorted(rank for part in parts for rank in part.ranks)
                    owned = work[len(ranks)]
                    owner = min(ranks, key=lambda rank: (owned[rank], rank))
                    owned[owner] += _work(parameter)
                    begun = id(parameter) in self._begun or bool(_shaped(self._optimizer.state.get(parameter) or {}))
                    made = _Tensor(parameter, number, parts, (owner,) if begun else tuple(ranks), begun)
                    found.setdefault(len(ranks), []).append(made)
        return [found[size] for size in sorted(found)]

    def _step(self, tensors: Sequence[_Tensor]) -> None:
        whole = self._gathered(tensors)
        mine = [tensor for tensor in tensors if self._rank in tensor.computed_by]
        numbers = {id(tensor.parameter): _constants(whole[id(tensor.parameter)].state) for tensor in mine}
        by_group: dict[int, list[StandIn]] = defaultdict(list)
        for tensor in mine:
            by_group[tensor.group].append(whole[id(tensor.parameter)])
        if mine:
            with standing_in(self._optimizer, by_group):
                self._optimizer.step()
        for tensor in mine:
            made = whole[id(tensor.parameter)]
            if tensor.begun and numbers[id(tensor.parameter)] != _constants(made.state):
                raise UsageError(
                    f"optimizer {type(self._optimizer).__name__} changes what it keeps of a tensor from step to step "
                    f"({sorted(map(str, made.state))}), so that other ranks cannot have it"
                )
        self._scattered([tensor for tensor in tensors if tensor.begun], whole)
        for tensor in mine:
            if not tensor.begun:
                self._keep(tensor, whole[id(tensor.parameter)])

    # --- shards to whole tensors, and back ---

    def _gathered(self, tensors: Sequence[_Tensor]) -> dict[int, StandIn]:
        """By the parameter's id, of those that this rank computes: on the device, whole."""
        sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        expected: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        found: dict[int, StandIn] = {}
        places: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            kept = self._optimizer.state.get(tensor.parameter) or {}
            live = [tensor.parameter, *_gradients(tensor.parameter), *(value for _, value in _shaped(kept))]
            for part in tensor.parts:
                if part.ranks[0] == self._rank:
                    for rank in tensor.computed_by:
                        sent[rank] += [local_of(value) for value in live]
            if self._rank not in tensor.computed_by:
                continue
            made = [torch.empty(value.shape, dtype=value.dtype, device=self._device) for value in live]
            found[id(tensor.parameter)] = _stand_in(tensor.parameter, kept, made)
            for part in tensor.parts:
                pieces = [torch.empty_like(value[part.box]).contiguous() for value in made]
                expected[part.ranks[0]] += pieces
                places += [(value[part.box], piece) for value, piece in zip(made, pieces, strict=True)]
        self._exchange(sent, expected)
        for place, piece in places:
            place.copy_(piece)
        return found

    def _scattered(self, tensors: Sequence[_Tensor], whole: Mapping[int, StandIn]) -> None:
        """From owners to all ranks that have parts."""
        sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        expected: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        places: list[tuple[torch.Tensor, torch.Tensor]] = []
        counted: list[tuple[dict[Any, Any], list[Any], list[torch.Tensor]]] = []
        for tensor in tensors:
            (owner,) = tensor.computed_by
            state = self._optimizer.state.get(tensor.parameter) or {}
            live = [tensor.parameter, *(value for _, value in _shaped(state))]
            if owner == self._rank:
                made = whole[id(tensor.parameter)]
                values = [made.tensor, *(made.state[key] for key, _ in _shaped(state))]
                counts = [_packed(made.state[key]).to(self._device) for key in _counted(state)]
                for part in tensor.parts:
                    for rank in part.ranks:
                        sent[rank] += [value[part.box].contiguous() for value in values] + counts
            if any(self._rank in part.ranks for part in tensor.parts):
                shards = [local_of(value) for value in live]
                pieces = [torch.empty(shard.shape, dtype=shard.dtype, device=self._device) for shard in shards]
                counts = [torch.empty_like(_packed(state[key]), device=self._device) for key in _counted(state)]
                expected[owner] += pieces + counts
                places += zip(shards, pieces, strict=True)
                counted.append((state, _counted(state), counts))
        self._exchange(sent, expected)
        for shard, piece in places:
            shard.copy_(piece)
        for state, keys, counts in counted:
            for key, count in zip(keys, counts, strict=True):
                state[key] = _unpacked(count, state[key])

    def _exchange(
        self, sent: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Each rank's `sent` to a rank are that rank's `expected` of it, which are filled."""
        given = [_joined(sent[rank], self._device) for rank in self._ranks]
        sizes = [sum(_padded(tensor) for tensor in expected[rank]) for rank in self._ranks]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self._all_to_all(received, torch.cat(given), sizes, [each.numel() for each in given], group=self._stage)
        at = 0
        for tensor in (tensor for rank in self._ranks for tensor in expected[rank]):
            if tensor.numel():
                taken = received[at : at + tensor.numel() * tensor.element_size()]
                tensor.view(-1).copy_(taken.view(tensor.dtype))
            at += _padded(tensor)

    def _keep(self, tensor: _Tensor, made: StandIn) -> None:
        """This rank's shards of what it has computed itself."""
        parameter, box, shard = tensor.parameter, tensor.part_of(self._rank).box, local_of(tensor.parameter)
        shard.copy_(made.tensor[box])
        for key, value in made.state.items():
            own = value
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                own = value[box].to(shard.device, copy=True).contiguous()
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise UsageError(not_elementwise(self._optimizer, parameter.numel(), str(key), value))
            put(self._optimizer, parameter, key, own, shard.shape)


def _rounds(tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
    """Of each owner as many tensors as its share of memory allows, one at least."""
    left = list(tensors)
    while left:
        taken: dict[int, int] = defaultdict(int)
        now: list[_Tensor] = []
        later: list[_Tensor] = []
        for tensor in left:
            size = _bytes(tensor.parameter)
            fits = all(not taken[rank] or taken[rank] + size <= _ROUND_BYTES for rank in tensor.computed_by)
            (now if fits else later).append(tensor)
            for rank in tensor.computed_by if fits else ():
                taken[rank] += size
        yield now
        left = later


def parts_of(parameter: DTensor) -> tuple[Part, ...]:
    """Who has what of it, in the order of their first ranks: a lane's slice, cut by rows over the lane, or of experts
    by those with the same ones. Raises UsageError where torch has sharded it otherwise."""
    mesh = parameter.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (_ONLY,), mesh.shape, strict=True))
    placement = over_cell(parameter)
    cut = placement.dim % parameter.dim() if isinstance(placement, Shard) else None
    boxes = _boxes(tuple(parameter.shape), tuple(sizes.items()), cut)
    ranks: dict[Ends, list[int]] = {}
    for box, rank in zip(boxes, mesh.mesh.flatten().tolist(), strict=True):
        ranks.setdefault(box, []).append(rank)
        if rank == dist.get_rank() and tuple(end - begin for begin, end in box) != local_of(parameter).shape:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} has {tuple(local_of(parameter).shape)} here where "
                f"{box} was expected: this torch shards otherwise"
            )
    return tuple(Part(tuple(slice(*ends) for ends in box), tuple(of)) for box, of in ranks.items())


@cache
def _boxes(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], cut: int | None) -> list[Ends]:
    """First index in each dimension, and the one after the last, of what each rank of a mesh has, in the order of its
    coordinates. `sizes`: its axes. `cut`: the dimension that the ranks of a cell cut."""
    axes, found = dict(sizes), []
    shards = math.prod(size for name, size in sizes if name not in (COPIES, EXPERTS, "tp"))
    for coordinate in product(*(range(size) for _, size in sizes)):
        at = dict(zip(axes, coordinate, strict=True))
        ends = [[0, size] for size in shape]
        if cut is not None:
            part = shape[cut] // axes["tp"]
            ends[cut] = [at["tp"] * part, (at["tp"] + 1) * part]
        first, last = ends[0]
        rows = (last - first) // axes.get(EXPERTS, 1)
        first += rows * at.get(EXPERTS, 0)
        block = -(-rows // shards)
        (shard,) = [where for name, where in at.items() if name not in (COPIES, EXPERTS, "tp")]
        ends[0] = [first + min(rows, shard * block), first + min(rows, (shard + 1) * block)]
        found.append(tuple((begin, end) for begin, end in ends))
    return found


def _stand_in(parameter: DTensor, kept: Mapping[Any, Any], made: Sequence[torch.Tensor]) -> StandIn:
    """`made`: the parameter, its gradient if it has one, and its state tensors."""
    tensor, *rest = made
    if _gradients(parameter):
        tensor.grad, *rest = rest
    shaped = {key: value for (key, _), value in zip(_shaped(kept), rest, strict=True)}
    return StandIn(marked(tensor, parameter), {key: shaped.get(key, value) for key, value in kept.items()})


def _gradients(parameter: DTensor) -> list[torch.Tensor]:
    return [] if parameter.grad is None else [parameter.grad]


def _shaped(state: Mapping[Any, Any]) -> list[tuple[Any, DTensor]]:
    return [(key, value) for key, value in state.items() if is_sharded(value)]


def _counted(state: Mapping[Any, Any]) -> list[Any]:
    """The keys of numbers, which a step may change: step counts."""
    numbers = (int, float, torch.Tensor)
    return [key for key, value in state.items() if isinstance(value, numbers) and not is_sharded(value)]


def _constants(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """All keys, and what must not change of them: of tensors and numbers their kind."""
    return {
        key: (type(value).__name__, tuple(value.shape)) if isinstance(value, torch.Tensor)
        else type(value).__name__ if isinstance(value, (int, float)) else value
        for key, value in state.items()
    }  # fmt: skip


def _packed(number: Any) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.detach()
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def _unpacked(packed: torch.Tensor, like: Any) -> Any:
    return packed.to(like.device) if isinstance(like, torch.Tensor) else type(like)(packed.item())


def _joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Their bytes, one after another."""
    made = torch.zeros(sum(map(_padded, tensors)), dtype=torch.uint8, device=device)
    at = 0
    for tensor in tensors:
        if tensor.numel():
            made[at : at + tensor.numel() * tensor.element_size()].view(tensor.dtype).copy_(tensor.reshape(-1))
        at += _padded(tensor)
    return made


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _work(parameter: torch.Tensor) -> int:
    """What a step on it costs, in proportion: products of a matrix with its transpose are most of it."""
    return parameter.numel() * (min(parameter.shape[-2:]) if parameter.dim() > 1 else 1)


def _bytes(parameter: torch.Tensor) -> int:
    return math.prod(parameter.shape) * parameter.element_size()

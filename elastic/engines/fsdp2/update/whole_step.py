"""An optimizer's step on whole tensors: Muon orthogonalises matrices, LAMB takes the norm of each tensor.

Each tensor has an owner among the ranks that have shards of it. There it is put together, with its gradient and its
optimizer state, the optimizer makes its own step on it, and each rank is given its shard back. So a step is the one
that a single process makes, bit for bit, at any number of ranks; each tensor is computed once; and state stays sharded.
What is under way is a few tensors for each owner, not a model.

What the optimizer keeps of a tensor is known before its first step, from the trial: the other ranks have to know what
they are given. What has other shapes than the tensor (factors of a matrix, preconditioners) is whole on all ranks that
have shards of it; its shapes the owner tells after the first step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.marks import marked, marks_of
from elastic.engines.fsdp2.update.counts import Counts
from elastic.engines.fsdp2.update.parts import Part, parts_of
from elastic.engines.fsdp2.update.stand_ins import StandIn, is_sharded, local_of, put, standing_in
from elastic.engines.fsdp2.update.trial import Kept, Trial, kind_of
from elastic.engines.optimizer.other_shapes import put_together, taken_apart, without_tensors

# What an owner has of others at once, unless a single tensor is larger.
_ROUND_BYTES = 64 << 20
# Any type's values begin at a multiple of it.
_ALIGNED = 16

_NUMBERS = (int, float, torch.Tensor)

# What has other shapes, by its keys, with places instead of tensors.
_Forms = Mapping[Any, Any]


@dataclass(frozen=True)
class _Tensor:
    """One parameter: in which group it is, its parts, this rank's number among them, and the rank that steps it."""

    parameter: DTensor
    group: int
    parts: tuple[Part, ...]
    own: int
    owner: int
    kept: Kept

    @property
    def given(self) -> bool:
        """Does this rank give its part?"""
        return self.parts[self.own].ranks[0] == dist.get_rank()


class WholeStep:
    """Of the parameters in some groups of one optimizer. Ranks of one stage call it together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trial: Trial,
        device: torch.device,
        stage: dist.ProcessGroup,
        all_to_all: Callable[..., Any],
        counts: Counts,
    ) -> None:
        """Before the first step, and before a restore. `stage`: all ranks that have shards of the optimizer's
        parameters, or of other slices of their layers."""
        self._optimizer, self._device, self._stage, self._all_to_all = optimizer, device, stage, all_to_all
        self._ranks, self._rank = dist.get_process_group_ranks(stage), dist.get_rank()
        self._rounds, self._fills = list(_in_rounds(optimizer, trial)), trial.fills
        self._counts = counts

    @torch.no_grad()
    def step(self) -> None:
        """Collective over the stage."""
        for tensors in self._rounds:
            self._step([tensor for tensor in tensors if self._is_stepped(tensor.parameter)])

    def _is_stepped(self, parameter: DTensor) -> bool:
        return parameter.requires_grad and (self._fills or parameter.grad is not None)

    def _step(self, tensors: Sequence[_Tensor]) -> None:
        # Before a step may have changed lists in their places.
        known = [_forms(tensor, self._optimizer.state.get(tensor.parameter) or {}) for tensor in tensors]
        whole = self._gathered(tensors)
        by_group: dict[int, list[StandIn]] = defaultdict(list)
        for tensor, made in whole:
            by_group[tensor.group].append(made)
        if whole:
            with self._counts.of(by_group), standing_in(self._optimizer, by_group):
                self._optimizer.step()
        for tensor, made in whole:
            _require_kept(self._optimizer, tensor, made)
        self._scattered(tensors, iter(whole), self._agreed(tensors, known, whole))

    def _agreed(
        self, tensors: Sequence[_Tensor], known: Sequence[_Forms], whole: Sequence[tuple[_Tensor, StandIn]]
    ) -> Sequence[_Forms]:
        """Of each of `tensors`. Collective where they are not `known`."""
        own = [_forms(tensor, made.state) for tensor, made in whole]
        if all(forms.keys() == tensor.kept.others for tensor, forms in zip(tensors, known, strict=True)):
            _require_forms(self._optimizer, tensors, known, whole, own)
            return known
        told: list[Any] = [None for _ in self._ranks]
        dist.all_gather_object(told, own, group=self._stage)
        # An owner's are in the order in which all ranks with parts of them have them.
        by_owner = {rank: iter(forms) for rank, forms in zip(self._ranks, told, strict=True)}
        return [next(by_owner[tensor.owner]) for tensor in tensors]

    # --- shards to whole tensors, and back ---

    def _gathered(self, tensors: Sequence[_Tensor]) -> list[tuple[_Tensor, StandIn]]:
        """Those that this rank owns, whole, on the device."""
        sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        expected: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        found: list[tuple[_Tensor, StandIn]] = []
        places: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            state = self._optimizer.state.get(tensor.parameter) or {}
            live = [tensor.parameter, _gradient(tensor.parameter), *_tensors(tensor, state)]
            if tensor.given:
                sent[tensor.owner] += [local_of(value) for value in live]
            if self._rank != tensor.owner:
                continue
            made = [torch.empty(value.shape, dtype=value.dtype, device=self._device) for value in live]
            found.append((tensor, _stand_in(tensor, state, made)))
            for part in tensor.parts:
                pieces = [torch.empty_like(value[part.box]).contiguous() for value in made]
                expected[part.ranks[0]] += pieces
                places += [(value[part.box], piece) for value, piece in zip(made, pieces, strict=True)]
        self._exchange(sent, expected)
        for place, piece in places:
            place.copy_(piece)
        return found

    def _scattered(
        self,
        tensors: Sequence[_Tensor],
        whole: Iterator[tuple[_Tensor, StandIn]],
        forms: Sequence[_Forms],
    ) -> None:
        """From owners to all ranks that have parts. `whole`: this rank's own, in their order."""
        sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        expected: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        for tensor, others in zip(tensors, forms, strict=True):
            if self._rank == tensor.owner:
                _, made = next(whole)
                values = [made.tensor, *(made.state[key] for key in tensor.kept.tensors)]
                numbers = [_packed(made.state[key]).to(self._device) for key in _counted(tensor.kept)]
                numbers += [each.contiguous() for each in _tensors_in(_others(tensor, made.state))]
                for part in tensor.parts:
                    for rank in part.ranks:
                        sent[rank] += [value[part.box].contiguous() for value in values] + numbers
            expected[tensor.owner] += self._room(tensor, others)
        self._exchange(sent, expected)
        arrived = {rank: iter(pieces) for rank, pieces in expected.items()}
        for tensor, others in zip(tensors, forms, strict=True):
            self._keep(tensor, others, arrived[tensor.owner])

    def _room(self, tensor: _Tensor, others: _Forms) -> list[torch.Tensor]:
        """For this rank's part of the parameter, of its state, for numbers and for what has other shapes."""
        shape = local_of(tensor.parameter).shape
        types = (tensor.parameter.dtype, *tensor.kept.tensors.values())
        numbers = (_packed(tensor.kept.numbers[key]) for key in _counted(tensor.kept))
        return [
            *(torch.empty(shape, dtype=each, device=self._device) for each in types),
            *(torch.empty_like(number, device=self._device) for number in numbers),
            *_tensors_in(put_together(dict(others), lambda _, shape, dtype: self._empty(shape, dtype))),
        ]

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _keep(self, tensor: _Tensor, others: _Forms, arrived: Iterator[torch.Tensor]) -> None:
        parameter, shard = tensor.parameter, local_of(tensor.parameter)
        shard.copy_(next(arrived))
        for key in tensor.kept.tensors:
            put(self._optimizer, parameter, key, next(arrived).to(shard.device), shard.shape)
        for key, example in tensor.kept.numbers.items():
            counted = isinstance(example, _NUMBERS)
            put(self._optimizer, parameter, key, _unpacked(next(arrived), example) if counted else example, shard.shape)
        self._optimizer.state[parameter].update(put_together(dict(others), lambda *_: next(arrived)))

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


def _in_rounds(optimizer: torch.optim.Optimizer, trial: Trial) -> Iterator[list[_Tensor]]:
    """What is stepped at once: of each owner as many tensors as its share of memory allows, one at least."""
    for tensors in _by_ranks(optimizer, trial):
        left = tensors
        while left:
            taken: dict[int, int] = defaultdict(int)
            now: list[_Tensor] = []
            later: list[_Tensor] = []
            for tensor in left:
                size = math.prod(tensor.parameter.shape) * tensor.parameter.element_size()
                fits = not taken[tensor.owner] or taken[tensor.owner] + size <= _ROUND_BYTES
                (now if fits else later).append(tensor)
                taken[tensor.owner] += size if fits else 0
            yield now
            left = later


def _by_ranks(optimizer: torch.optim.Optimizer, trial: Trial) -> list[list[_Tensor]]:
    """Those that lie over as many ranks together: what lies over one lane alone, each lane has by itself, and no rank
    sees how others deal out theirs. Owners and order are the same on all ranks of a tensor."""
    found: dict[int, list[_Tensor]] = {}
    alike: dict[Any, tuple[tuple[Part, ...], list[int], int]] = {}
    work: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number in sorted(trial.groups):
        for parameter in optimizer.param_groups[number]["params"]:
            # A thousand ranks have two thousand matrices of a few shapes.
            key = (parameter.shape, parameter.placements, id(parameter.device_mesh))
            if key not in alike:
                alike[key] = _dealt(parameter)
            parts, ranks, own = alike[key]
            owned = work[len(ranks)]
            owner = min(ranks, key=lambda rank: (owned[rank], rank))
            owned[owner] += _work(parameter)
            kept = trial.kept[kind_of(optimizer, number, parameter)]
            found.setdefault(len(ranks), []).append(_Tensor(parameter, number, parts, own, owner, kept))
    return [found[size] for size in sorted(found)]


def _dealt(parameter: DTensor) -> tuple[tuple[Part, ...], list[int], int]:
    """Its parts, all ranks that have any, and the number of this rank's."""
    parts = parts_of(parameter)
    own = next(place for place, part in enumerate(parts) if dist.get_rank() in part.ranks)
    return parts, sorted(rank for part in parts for rank in part.ranks), own


def _stand_in(tensor: _Tensor, state: Mapping[Any, Any], made: Sequence[torch.Tensor]) -> StandIn:
    """`made`: the parameter, its gradient, and what is kept like it, if there is some."""
    whole, gradient, *rest = made
    whole.grad = gradient
    kept = dict(zip(tensor.kept.tensors, rest, strict=False))
    # In the order of before: an optimizer may go through it.
    return StandIn(
        marked(whole, marks_of(tensor.parameter)), {key: kept.get(key, value) for key, value in state.items()}
    )


def _gradient(parameter: DTensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _tensors(tensor: _Tensor, state: Mapping[Any, Any]) -> list[DTensor]:
    """All that is kept like the parameter, or, before the first step, nothing."""
    return [state[key] for key in tensor.kept.tensors if is_sharded(state.get(key))]


def _others(tensor: _Tensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What has other shapes, in an order that all ranks have."""
    return {key: state[key] for key in sorted(tensor.kept.others, key=str) if key in state}


def _forms(tensor: _Tensor, state: Mapping[Any, Any]) -> _Forms:
    return without_tensors(_others(tensor, state))


def _require_forms(
    optimizer: torch.optim.Optimizer,
    tensors: Sequence[_Tensor],
    known: Sequence[_Forms],
    whole: Sequence[tuple[_Tensor, StandIn]],
    own: Sequence[_Forms],
) -> None:
    """Raises UsageError where a step has left other shapes than the one before."""
    before = {id(tensor): forms for tensor, forms in zip(tensors, known, strict=True)}
    for (tensor, _), forms in zip(whole, own, strict=True):
        if forms != before[id(tensor)]:
            raise UsageError(
                f"optimizer {type(optimizer).__name__} keeps other shapes of a parameter of shape "
                f"{tuple(tensor.parameter.shape)} after this step than before: {forms}, {before[id(tensor)]}; the "
                "other workers do not know of it"
            )


def _tensors_in(values: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Of all of them, in their order."""
    return [tensor for key, value in values.items() for tensor in taken_apart(str(key), value)[1].values()]


def _counted(kept: Kept) -> list[Any]:
    """The keys of numbers, which a step may change."""
    return [key for key, value in kept.numbers.items() if isinstance(value, _NUMBERS)]


def _require_kept(optimizer: torch.optim.Optimizer, tensor: _Tensor, made: StandIn) -> None:
    """Raises UsageError where a step has left something else than the trial's."""
    kept, state, name = tensor.kept, made.state, type(optimizer).__name__
    types = {k: value.dtype for k, value in state.items() if k not in kept.others and _is_like(value, made.tensor)}
    constants = {key: value for key, value in kept.numbers.items() if not isinstance(value, _NUMBERS)}
    same = state.keys() == kept.tensors.keys() | kept.numbers.keys() | kept.others and types == dict(kept.tensors)
    if not (same and all(state[key] == constants[key] for key in constants)):
        raise UsageError(
            f"optimizer {name} keeps other state of a parameter of shape {tuple(made.tensor.shape)} than of toy "
            f"tensors: {sorted(map(str, state))}, {types} for {dict(kept.tensors)}; the other workers cannot have it"
        )


def _is_like(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == tensor.shape


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

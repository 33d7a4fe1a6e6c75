"""Which of an optimizer's parameter groups are stepped on whole tensors? Some steps on toy tensors tell.

Shards suffice where a tensor that is cut is stepped as the whole one is. Otherwise each tensor is stepped whole, by one
rank (`whole_step`), and what that cannot do is refused: an optimizer that looks at several tensors at once, or that has
collectives of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.marks import marked, marks_of
from elastic.engines.fsdp2.update.stand_ins import StandIn, standing_in
from elastic.engines.optimizer.numbers import Key, changed, numbers_of, refuse_attributes
from elastic.engines.optimizer.other_shapes import is_other
from elastic.engines.optimizer.state import not_elementwise
from elastic.engines.optimizer.trial import MOST_STEPS, STEPS, Collectives, alike, is_elementwise, twin_of
from elastic.engines.optimizer.whole_tensor import refuse_beyond_tensors

# Of as many dimensions as the parameter has. Above the size from which block-wise quantised optimizers quantise
# (4,096), and cut between two blocks of any size.
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (12_007,), 2: (151, 83), 3: (53, 19, 13), 4: (53, 19, 5, 3)}
_CUT = 0.4

# Of each optimizer, by the kinds of its parameters: engines are built anew, and it stays.
_known: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[str, ...], Trial]] = WeakKeyDictionary()


class Kept(NamedTuple):
    """What an optimizer keeps of a parameter from its first step on: the types of tensors like it, by their keys,
    numbers, of which these are examples, and the keys of what has other shapes."""

    tensors: Mapping[Any, torch.dtype]
    numbers: Mapping[Any, Any]
    others: frozenset[Any] = frozenset()


class Trial(NamedTuple):
    """`groups`: the numbers of those that are stepped on whole tensors. `kept`: by what `kind_of` says of them, of each
    kind of parameter in these. `fills`: parameters without gradient are stepped, too, as if it were zero. `counts`: a
    step changes numbers of its groups, whatever its tensors are: those of `toys`, by group, which have made some."""

    groups: frozenset[int]
    kept: Mapping[str, Kept]
    fills: bool = False
    counts: bool = False
    toys: Mapping[int, StandIn] = MappingProxyType({})

    @property
    def others(self) -> frozenset[str]:
        """What has other shapes than its parameter's, of any kind."""
        return frozenset(str(key) for each in self.kept.values() for key in each.others)


def try_optimizer(optimizer: torch.optim.Optimizer) -> Trial:
    """Before its first step. Collective where its step is. Raises UsageError for an optimizer whose result would depend
    on the number of ranks even with whole tensors."""
    if is_elementwise(optimizer):
        return Trial(frozenset(), {})
    refuse_beyond_tensors(type(optimizer).__name__)
    kinds = list(_kinds(optimizer))
    known = _known.setdefault(optimizer, {})
    signature = tuple(kind.told for kind in kinds)
    if signature not in known:
        known[signature] = _tried(optimizer, kinds)
    return known[signature]


def kind_of(optimizer: torch.optim.Optimizer, group: int, parameter: torch.Tensor) -> str:
    """What tells kinds of parameters apart; before the first step."""
    marks = sorted(marks_of(parameter).items())
    return repr((group, parameter.dim(), parameter.dtype, marks, _flags(optimizer, parameter)))


def _tried(optimizer: torch.optim.Optimizer, kinds: Sequence[_Kind]) -> Trial:
    name = type(optimizer).__name__
    try:
        # What is done here must not draw from the run's random streams.
        with torch.random.fork_rng(devices=[]), Collectives() as collectives:
            groups = frozenset(kind.group for kind in kinds if not _cut_is_whole(kind))
            whole = [(kind, kinds[place - 1]) for place, kind in enumerate(kinds) if kind.group in groups]
            kept, counts, toys = {}, False, dict[int, StandIn]()
            for kind, other in whole:
                alone, counted = _alone(kind, other)
                kept[kind.told], counts = _kept(kind, alone), counts or counted
                toys.setdefault(kind.group, alone)
            fills = any(_fills(kind) for kind, _ in whole)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"optimizer {name} could not be tried on a toy tensor ({type(error).__name__}: {error}), so whether its "
            "result depends on the number of workers is unknown; use an optimizer of torch.optim, or of one that has "
            "collectives of its own the class for a single device"
        ) from error
    if groups and (held := _held_elsewhere(optimizer)):
        raise _refused(name, f"its {held!r} has parameters, or their ids, besides its groups and its state")
    if groups and collectives.names:
        raise _refused(
            name,
            f"its step has collectives of its own ({', '.join(sorted(collectives.names))}), and each tensor is stepped "
            "by one worker here: give the class that its authors have for a single device",
        )
    return Trial(groups, kept, fills, counts, toys)


@dataclass(frozen=True)
class _Kind:
    """Parameters of one group that have as many dimensions, and that the optimizer, or a script, marks alike."""

    optimizer: torch.optim.Optimizer
    group: int
    like: torch.Tensor
    told: str

    @property
    def shape(self) -> tuple[int, ...]:
        return _SHAPES.get(self.like.dim(), (53, 29, *[3] * (self.like.dim() - 2)))

    @property
    def cut(self) -> int:
        return int(self.shape[0] * _CUT)

    def values(self, seed: int, part: slice) -> torch.Tensor:
        """Larger in the later rows than in the first, so that no statistic over a part equals that over the whole."""
        values = torch.randn(math.prod(self.shape), generator=torch.Generator().manual_seed(seed)).view(self.shape)
        if values.dim():
            values[self.cut :] *= 7.0
            values = values[part].contiguous()
        return values.to(dtype=self.like.dtype, device=self.like.device)


def _kinds(optimizer: torch.optim.Optimizer) -> Iterator[_Kind]:
    for number, group in enumerate(optimizer.param_groups):
        seen: set[str] = set()
        for parameter in group["params"]:
            told = kind_of(optimizer, number, parameter)
            if told not in seen:
                seen.add(told)
                yield _Kind(optimizer, number, parameter, told)


class _Stepped(NamedTuple):
    """Toy tensors after some steps, and what the optimizer has counted in: numbers that have changed."""

    found: list[StandIn]
    counted: Mapping[Key, Any]


def _cut_is_whole(kind: _Kind) -> bool:
    if not kind.shape:
        return True
    whole = _stepped([(kind, 0)])
    if _kept(kind, whole.found[0]).others:
        return False
    parts = [_stepped([(kind, 0)], part) for part in (slice(None, kind.cut), slice(kind.cut, None))]
    counted = all(part.counted == whole.counted for part in parts)
    return counted and alike(whole.found[0], [part.found[0] for part in parts])


def _alone(kind: _Kind, other: _Kind) -> tuple[StandIn, bool]:
    """A toy tensor that has been stepped, and whether the steps count in their group. Raises UsageError where a step of
    a whole tensor depends on others, or the counts do on tensors."""
    name = type(kind.optimizer).__name__
    together = _stepped([(kind, 0), (kind, 1), (other, 2)])
    for place in (1, 0):
        alone = _stepped([(kind, place)])
        # Which ranks make a step depends on who owns what.
        refuse_attributes(kind.optimizer, alone.counted)
        if not torch.allclose(together.found[place].tensor, alone.found[0].tensor, rtol=1e-5, atol=1e-7):
            raise _refused(name, "a step of a tensor depends on others")
        own = {key: value for key, value in together.counted.items() if key[0] == kind.group}
        if own != alone.counted:
            keys = sorted(key for key in own.keys() | alone.counted if own.get(key) != alone.counted.get(key))
            told = ", ".join(f"param_groups[{group}][{key!r}]" for group, key in keys)
            raise _refused(name, f"its step changes {told} by what its tensors are")
    return alone.found[0], bool(alone.counted)


def _fills(kind: _Kind) -> bool:
    try:
        _stepped([(kind, 0)], with_gradient=False)
    except Exception:  # noqa: BLE001 - it steps what has a gradient
        return False
    return True


def _stepped(
    chosen: Sequence[tuple[_Kind, int]],
    part: slice = slice(None),
    with_gradient: bool = True,
) -> _Stepped:
    """Toy tensors of these kinds, of each that part, after some steps of a copy of the optimizer that has no
    others. The numbers are those of their values. Raises UsageError where it keeps more after a later step."""
    optimizer = chosen[0][0].optimizer
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    toy = twin_of(optimizer, {id(parameter): torch.zeros(1) for parameter in held})
    for group in toy.param_groups:
        if "lr" in group:
            # A schedule may begin at zero, where every step is equal to every other.
            group["lr"] = group["lr"].fill_(0.01) if isinstance(group["lr"], torch.Tensor) else 0.01
    found: list[StandIn] = []
    by_group: dict[int, list[StandIn]] = {}
    for kind, number in chosen:
        found.append(StandIn(marked(kind.values(number, part), marks_of(kind.like)), _flags(optimizer, kind.like)))
        by_group.setdefault(kind.group, []).append(found[-1])
    before, started, kept = numbers_of(toy), [each.tensor.clone() for each in found], []
    for step in range(MOST_STEPS):
        for (kind, number), each in zip(chosen, found, strict=True):
            each.tensor.grad = kind.values(100 + 10 * step + number, part) if with_gradient else None
        with standing_in(toy, by_group):
            # By the class: a scheduler's wrapper around the instance's own step would step the original.
            type(toy).step(toy)
        kept.append([sorted(map(str, each.state)) for each in found])
        # Some begin later.
        moved = not any(torch.equal(each.tensor, was) for each, was in zip(found, started, strict=True))
        if moved and step + 1 >= STEPS:
            break
    if not moved:
        raise RuntimeError("its step changed nothing")
    if kept[0] != kept[-1]:
        raise _refused(
            type(toy).__name__, f"it keeps {kept[0][0]} of a tensor after one step, {kept[-1][0]} after {len(kept)}"
        )
    return _Stepped(found, changed(toy, before))


def _kept(kind: _Kind, found: StandIn) -> Kept:
    """Raises UsageError for state that is neither made of tensors nor a number."""
    tensors: dict[Any, torch.dtype] = {}
    numbers: dict[Any, Any] = {}
    others: set[Any] = set()
    for key, value in found.state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == found.tensor.shape:
            tensors[key] = value.dtype
        elif value is None or isinstance(value, (bool, int, float, str)) or _is_number(value):
            numbers[key] = value
        elif is_other(value):
            others.add(key)
        else:
            raise UsageError(not_elementwise(kind.optimizer, found.tensor.numel(), str(key), value))
    return Kept(tensors, numbers, frozenset(others))


def _held_elsewhere(optimizer: torch.optim.Optimizer) -> str:
    """The attribute that has parameters or their ids, by which its step would not know what stands in for them."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in held}
    names = (name for name in vars(optimizer) if name not in ("param_groups", "state"))
    return next((name for name in names if _has(vars(optimizer)[name], ids, 4)), "")


def _has(value: Any, ids: Collection[int], depth: int) -> bool:
    if id(value) in ids or (isinstance(value, int) and value in ids):
        return True
    if depth and isinstance(value, Mapping):
        return _has(list(value), ids, depth - 1) or _has(list(value.values()), ids, depth - 1)
    several = bool(depth) and isinstance(value, (list, tuple, set, frozenset))
    return several and any(_has(each, ids, depth - 1) for each in value)


def _flags(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[Any, Any]:
    """What the optimizer has marked it with before its first step."""
    state = optimizer.state.get(parameter) or {}
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _refused(name: str, why: str) -> UsageError:
    return UsageError(f"optimizer {name} cannot be used with the fsdp2 engine here: {why}")

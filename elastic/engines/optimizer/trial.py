"""Does an optimizer update every weight by itself? A step on a toy tensor, whole and cut in two, tells.

ZeRO gives the optimizer one flat tensor per rank. An optimizer that looks at a whole tensor (a norm, a factorisation)
then updates by where the flat was cut, and its result depends on the world size.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.core.errors import UsageError
from elastic.engines.optimizer.numbers import Key, changed, numbers_of
from elastic.engines.optimizer.other_shapes import is_other
from elastic.engines.optimizer.state import not_elementwise
from elastic.engines.optimizer.whole_tensor import refuse_whole_tensor, refused

# One value per weight and scalars, by their definition: a trial would cost time and could tell nothing new.
_ELEMENTWISE = frozenset(
    {
        *(f"torch.optim.{name}" for name in ("adadelta.Adadelta", "adagrad.Adagrad", "adam.Adam", "adamax.Adamax")),
        *(f"torch.optim.{name}" for name in ("adamw.AdamW", "asgd.ASGD", "nadam.NAdam", "radam.RAdam")),
        *(f"torch.optim.{name}" for name in ("rmsprop.RMSprop", "rprop.Rprop", "sgd.SGD")),
        *(f"deepspeed.ops.adam.{name}" for name in ("fused_adam.FusedAdam", "cpu_adam.DeepSpeedCPUAdam")),
        *(f"deepspeed.ops.lion.{name}" for name in ("fused_lion.FusedLion", "cpu_lion.DeepSpeedCPULion")),
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
    }
)
# Above the size from which block-wise quantised optimizers quantise (4,096), cut between two blocks of any size.
_NUMEL, _CUT = 12_007, 5_003
# Some begin to look at whole tensors after a few.
STEPS = 8
# Of what changes nothing at first.
MOST_STEPS = 16
# A tensor, and what an optimizer keeps of it.
_Stepped = tuple[torch.Tensor, Mapping[Any, Any]]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Is it known to update every weight by itself?"""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _ELEMENTWISE


def try_optimizer(
    base: torch.optim.Optimizer, partitioned: bool, live: Mapping[int, torch.Tensor] | None = None
) -> frozenset[str]:
    """What it keeps in other shapes than its parameters'. Raise UsageError for an optimizer whose result would depend
    on the world size, or whose state cannot be carried.

    `partitioned`: it updates slices of flat tensors (ZeRO 1 to 3). Otherwise it has every parameter whole, and only its
    state is looked at. `live` gives, by number, one tensor of each parameter group: DeepSpeed's stage 3 fills groups
    during a step only.
    """
    kind = type(base)
    if is_elementwise(base):
        return frozenset()
    if partitioned:
        refuse_whole_tensor(kind.__name__)
    try:
        # DeepSpeed's flats require gradients; what is done here must not draw from the run's random streams.
        with torch.random.fork_rng(devices=[]):
            others = _others(base, live or {}) if not partitioned else frozenset[str]()
            equal = not partitioned or _is_cut_alike(base, live or {})
    except UsageError:
        raise
    except Exception as error:
        if not partitioned:
            # It may want sparse gradients. State that cannot be carried is then refused at the first snapshot.
            return frozenset()
        raise UsageError(
            f"optimizer {kind.__name__} could not be tried on a toy tensor ({type(error).__name__}: {error}), so "
            "whether its result depends on the world size is unknown; use AdamW or another optimizer of torch.optim"
        ) from error
    if not equal:
        why = "a step on a toy tensor gave another result when the tensor was cut in two"
        raise refused(kind.__name__, why)
    return others


def _others(base: torch.optim.Optimizer, live: Mapping[int, torch.Tensor]) -> frozenset[str]:
    found: set[str] = set()
    with Collectives() as collectives:
        _stepped(base, live, slice(None), found)
    if collectives.names:
        _require_same_state(base, live, sorted(collectives.names))
    return frozenset(found)


def _is_cut_alike(base: torch.optim.Optimizer, live: Mapping[int, torch.Tensor]) -> bool:
    whole, counted = _stepped(base, live, slice(None))
    parts = [_stepped(base, live, part) for part in (slice(None, _CUT), slice(_CUT, None))]
    if any(own != counted for _, own in parts):
        return False
    return all(alike(tensor, [found[number] for found, _ in parts]) for number, tensor in enumerate(whole))


def alike(
    whole: tuple[torch.Tensor, Mapping[Any, Any]], parts: Sequence[tuple[torch.Tensor, Mapping[Any, Any]]]
) -> bool:
    """Are a tensor and what is kept of it that of its parts? The numbers that are kept have to be those of each."""
    tensor, state = whole
    pairs = [(tensor, torch.cat([part for part, _ in parts]))]
    for key, value in state.items():
        own = [kept.get(key) for _, kept in parts]
        if not isinstance(value, torch.Tensor):
            if any(each != value for each in own):
                return False
        elif value.dim() and value.shape == tensor.shape:
            pairs.append((value, torch.cat([each for each in own if each is not None])))
        else:
            pairs += [(value, each) for each in own if each is not None]
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)
        for one, other in pairs
    )


def _require_same_state(
    base: torch.optim.Optimizer, live: Mapping[int, torch.Tensor], collectives: Sequence[str]
) -> None:
    """Raise UsageError on all ranks where a step leaves the state of a tensor on some of them. Collective."""
    toy, tensors = _copy(base, live, slice(None), flat=False)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    type(toy).step(toy)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [{str(key): _shape(value) for key, value in toy.state[t].items()} for t in tensors])
    if any(other != told[0] for other in told):
        raise UsageError(
            f"optimizer {type(base).__name__} deals its tensors out among the ranks, by collectives of its own "
            f"({', '.join(collectives)}): the state of each is on one rank, and would be lost with it. Give the class "
            "that its authors have for a single device: all ranks have the whole gradients, and step alike"
        )


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _stepped(
    base: torch.optim.Optimizer, live: Mapping[int, torch.Tensor], part: slice, others: set[str] | None = None
) -> tuple[list[_Stepped], Mapping[Key, Any]]:
    """One toy tensor per parameter group, with what is kept of it, after some steps of a copy of `base`, cut to `part`;
    and the numbers that it has changed. `others`: they have the shapes of parameters, and what is kept in other ones is
    added to this; None: flat, and nothing may be."""
    flat = others is None
    toy, tensors = _copy(base, live, part, flat)
    counted, before = numbers_of(toy), [tensor.detach().clone() for tensor in tensors]
    for step in range(MOST_STEPS):
        for number, tensor in enumerate(tensors):
            gradient = _values(tensor, 1 + step + number, part) if flat else torch.ones_like(tensor)
            tensor.grad = gradient
        # By the class: a scheduler's wrapper around the instance's own step would step the original.
        type(toy).step(toy)
        # Some begin later.
        moved = not any(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
        if moved and step + 1 >= STEPS:
            break
    if not moved:
        raise RuntimeError("its step changed nothing")
    for tensor in tensors:
        _check_state(toy, tensor, others)
    return [(tensor.detach().clone(), toy.state.get(tensor, {})) for tensor in tensors], changed(toy, counted)


def _copy(
    base: torch.optim.Optimizer, live: Mapping[int, torch.Tensor], part: slice, flat: bool
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """A copy of `base` that holds a toy tensor in place of each group's first parameter, and nothing of the others.

    Whatever in it refers to a parameter (a wrapped optimizer, a list of its own) refers to the toy afterwards.
    """
    memo: dict[int, Any] = {}
    tensors = []
    for number, group in enumerate(base.param_groups):
        for place, parameter in enumerate(group["params"] or [live.get(number, torch.zeros(1))]):
            toy = _toy(parameter, number, part, flat) if place == 0 else parameter.detach().new_zeros(1)
            memo[id(parameter)] = toy.requires_grad_(True)
            if place == 0:
                tensors.append(toy)
            for value in (base.state.get(parameter) or {}).values():
                if isinstance(value, torch.Tensor) and value.numel() == parameter.numel():
                    # Made before the first step (torch's Adagrad): all elements alike.
                    start = value.reshape(-1)[:1] if value.numel() else value.new_zeros(1)
                    memo[id(value)] = start.detach().clone().expand(toy.shape).contiguous()
    twin = twin_of(base, memo)
    for group, tensor in zip(twin.param_groups, tensors, strict=True):
        group["params"] = [tensor]
    return twin, tensors


def twin_of(base: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy of it, with what `memo` has for objects by their ids.

    Not `deepcopy(base)`: torch's optimizers copy their groups and state only, and lose what a subclass adds."""
    kind = type(base)
    twin = memo[id(base)] = kind.__new__(kind)
    for value in vars(base).values():
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            twin_of(value, memo)
    for name, value in vars(base).items():
        # Hooks belong to the engine that holds the original, what hides a method (`step`, `zero_grad`) to it or to a
        # scheduler.
        if name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            vars(twin)[name] = OrderedDict()
        elif not (callable(value) and hasattr(kind, name)):
            vars(twin)[name] = copy.deepcopy(value, memo)
    for group in twin.param_groups:
        if "lr" in group:
            # A schedule may begin at zero, where every step is equal to every other.
            group["lr"] = group["lr"].fill_(0.01) if isinstance(group["lr"], torch.Tensor) else 0.01
    return twin


def _toy(parameter: torch.Tensor, number: int, part: slice, flat: bool) -> torch.Tensor:
    if flat:
        return _values(parameter, 100 + number, part)
    shape = [min(size, 128) for size in parameter.shape]
    return torch.linspace(0.1, 1.0, math.prod(shape), dtype=parameter.dtype, device=parameter.device).view(shape)


def _values(like: torch.Tensor, seed: int, part: slice) -> torch.Tensor:
    """Larger in the second half than in the first, so that no statistic over a half equals that over the whole."""
    values = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(seed))
    values[_CUT:] *= 7.0
    return values[part].to(dtype=like.dtype, device=like.device)


def _check_state(toy: torch.optim.Optimizer, tensor: torch.Tensor, others: set[str] | None) -> None:
    for key, value in toy.state.get(tensor, {}).items():
        if others is not None and is_other(value, tensor):
            others.add(str(key))
            continue
        if isinstance(value, torch.Tensor):
            kept = value.numel() in (1, tensor.numel())
        else:
            kept = value is None or isinstance(value, (bool, int, float, str))
        if not kept:
            raise UsageError(not_elementwise(toy, tensor.numel(), str(key), value))


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of those that were made meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.add(func.__name__.split(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))

"""Some weights of one rank around one optimizer step, and that step computed again: what audits of updates compare.

The optimizer's own class computes it again, on tensors of the sampled weights alone: of an optimizer whose step treats
every weight by itself the result is the same.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from elastic.engines.live_state import MASTER, Master, ShardedState
from elastic.engines.optimizer.state import MasterState, read_states

# As many weights of every rank are looked at. Scattered: a part of a device that computes wrongly has some of them.
SAMPLED = 1024
# Their steps are functions of tensors and numbers. DeepSpeed's optimizers for CPUs are left out: their powers of beta
# are counted up in a library, which a repetition would change.
_REPEATABLE = frozenset(
    {
        *(f"torch.optim.{name}" for name in ("adadelta.Adadelta", "adagrad.Adagrad", "adam.Adam", "adamax.Adamax")),
        *(f"torch.optim.{name}" for name in ("adamw.AdamW", "asgd.ASGD", "nadam.NAdam", "radam.RAdam")),
        *(f"torch.optim.{name}" for name in ("rmsprop.RMSprop", "rprop.Rprop", "sgd.SGD")),
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "deepspeed.ops.lion.fused_lion.FusedLion",
    }
)
GRADIENT = "gradient"
# On a CPU other elements of a tensor are rounded in another order.
NO_HALF = "updates are not audited: masters or moments of half precision depend on where in a tensor a weight lies"


def not_repeatable(base: Any, dtypes: Iterable[torch.dtype]) -> str:
    """Why the step of `base` on masters of these types cannot be computed again for some weights alone, as a sentence;
    "" where it can."""
    kind = type(base)
    if f"{kind.__module__}.{kind.__qualname__}" in _REPEATABLE:
        return NO_HALF if any(is_half(dtype) for dtype in dtypes) else ""
    return (
        f"updates of {kind.__name__} are not audited: its step is not known to treat every weight by itself without "
        "other memory (torch's Adam, AdamW, SGD and the like do, and DeepSpeed's FusedAdam)"
    )


def is_half(dtype: torch.dtype) -> bool:
    return dtype not in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Place:
    """Where sampled weights lie: elements `at` of the flattened master number `master`, of the parameters `names`."""

    master: int
    at: torch.Tensor
    names: tuple[str, ...]


@dataclass
class Sample:
    """`before` and `after` the step, by master: (elements,) values by kind, "gradient" among them; and numbers of the
    optimizer's state, which one master has once. `groups` are the hyper-parameters of the step by parameter group: when
    it is over, a scheduler has set those of the next."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    before: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    after: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


def places(masters: Sequence[Master], seed: int, most: int = SAMPLED) -> list[Place]:
    """Up to `most` of this rank's weights, chosen by `seed` alone, none in padding."""
    # A parameter without dimensions has a state that looks like a number.
    shaped = [(number, master) for number, master in enumerate(masters) if master.tensor.dim()]
    chunks = [(number, chunk) for number, master in shaped for chunk in master.chunks if chunk.numel]
    ends = torch.tensor([chunk.numel for _, chunk in chunks], dtype=torch.int64).cumsum(0)
    total = int(ends[-1]) if chunks else 0
    if total <= most:
        drawn = torch.arange(total)
    else:
        drawn = torch.randint(total, (most,), generator=torch.Generator().manual_seed(seed)).unique()  # type: ignore[no-untyped-call]
    found: dict[int, tuple[list[int], list[str]]] = {}
    for position, at in zip(drawn.tolist(), torch.searchsorted(ends, drawn, right=True).tolist(), strict=True):
        number, chunk = chunks[at]
        offsets, names = found.setdefault(number, ([], []))
        offsets.append(chunk.offset + position - int(ends[at]) + chunk.numel)
        names.append(chunk.name)
    return [
        Place(number, torch.tensor(offsets, device=masters[number].tensor.device), tuple(names))
        for number, (offsets, names) in sorted(found.items())
    ]


@contextmanager
def sampling(state: ShardedState, chosen: Sequence[Place], sample: Sample) -> Iterator[None]:
    """Around the engine's step, in which the optimizer may step in parts, one after the other."""
    masters = state.masters()
    by_key = {id(masters[place.master].key): (place, masters[place.master]) for place in chosen}
    base = state.base
    sample.groups = [_copied({key: group[key] for key in group if key != "params"}) for group in base.param_groups]
    hooks = (
        base.register_step_pre_hook(partial(_before, by_key, sample)),
        base.register_step_post_hook(partial(_after, by_key, sample)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stepped_again(
    base: torch.optim.Optimizer,
    group: Mapping[str, Any],
    values: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """The values after a step of `base` from those of one `Sample.before`, with the hyper-parameters `group`."""
    weights = values[MASTER].clone().requires_grad_(True)
    weights.grad = values[GRADIENT].clone()
    kept = _copied({kind: value for kind, value in values.items() if kind not in (MASTER, GRADIENT)} | dict(numbers))
    kind = type(base)
    twin = kind.__new__(kind)
    # Hooks belong to the original, and so does a scheduler's wrapper around its step.
    vars(twin).update({name: value for name, value in vars(base).items() if name != "step"})
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = [{**_copied(group), "params": [weights]}]
    twin.state = defaultdict(dict, {weights: kept} if kept else {})
    kind.step(twin)
    (after,) = read_states(twin, [Master("again", 0, weights, (), (), replicated=False)])
    return {MASTER: weights.detach(), **after.tensors}


def _before(by_key: Mapping[int, tuple[Place, Master]], sample: Sample, base: torch.optim.Optimizer, *_: Any) -> None:
    for place, master, parameter in _stepping(by_key, base):
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            continue
        (state,) = read_states(base, [master])
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        gradients = _taken(local, place).to(master.tensor.dtype)
        sample.before[place.master] = {**_values(place, master, state), GRADIENT: gradients}
        sample.numbers[place.master] = _copied(state.scalars)


def _after(by_key: Mapping[int, tuple[Place, Master]], sample: Sample, base: torch.optim.Optimizer, *_: Any) -> None:
    for place, master, _parameter in _stepping(by_key, base):
        if place.master in sample.before:
            (state,) = read_states(base, [master])
            sample.after[place.master] = _values(place, master, state)


def _stepping(
    by_key: Mapping[int, tuple[Place, Master]], base: torch.optim.Optimizer
) -> Iterator[tuple[Place, Master, Any]]:
    """What this step of the optimizer is about to change."""
    for group in base.param_groups:
        for parameter in group["params"]:
            if id(parameter) in by_key:
                yield (*by_key[id(parameter)], parameter)


def _values(place: Place, master: Master, state: MasterState) -> dict[str, torch.Tensor]:
    return {kind: _taken(value, place) for kind, value in {MASTER: master.tensor, **state.tensors}.items()}


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _taken(values: torch.Tensor, place: Place) -> torch.Tensor:
    return values.detach().reshape(-1)[place.at]

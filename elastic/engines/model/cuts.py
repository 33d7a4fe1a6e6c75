"""Which part of each parameter a rank was left with when its layers were cut, checked with the model's own values.

What engines say of their cuts is looked at where it is written: right after it, the rank's slice must equal the part
of the whole tensor that it is said to be. Where it does not, a run trains all the same, and its checkpoints say why
nobody can put these slices together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastic.comm.agreement import Agreement
from elastic.core.errors import UsageError
from elastic.core.sharding.cuts import Cut
from elastic.engines.model.placeholders import is_placeholder
from elastic.engines.model.plain_names import named_parameters

# Of a parameter its cut, or in words why its slices cannot be put together.
Cuts = Mapping[str, Cut | str]

# Of a parameter that a rank has whole, and was given other values of.
CHANGED = "it is whole, and its values are not what they were before"


class Whole:
    """A module's parameters before they are cut: made, then the cut, then `compared` once for each parameter there is.
    Keeps them in memory meanwhile.

    A tensor of one value, as biases are made, would equal any part of itself: while it is cut it has random ones.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        generator, constants = torch.Generator().manual_seed(0), dict[int, torch.Tensor]()
        for _, parameter in named_parameters(module):
            if _has_values(parameter.data) and _is_constant(parameter.data):
                constants[id(parameter)] = parameter.data.flatten()[0].clone()
                # In place: whatever else shares the memory goes on doing so.
                parameter.data.copy_(torch.rand(parameter.shape, generator=generator))
        named = list(named_parameters(module, remove_duplicate=False))
        self._before = {name: parameter.detach() for name, parameter in named}
        self._samples = {name: _sample(value) for name, value in self._before.items()}
        self._constants = {name: constants[id(parameter)] for name, parameter in named if id(parameter) in constants}

    def compared(self, name: str, local: torch.Tensor, cut: Cut | None, lane: int) -> str | None:
        """In words why `local` (plain, shares the parameter's memory) is not what `lane` has by `cut`, or with None the
        whole; None where it is."""
        before = self._before.get(name)
        said = _wrong(before, local.detach(), cut, lane)
        if before is not None and not torch.equal(_sample(before), self._samples[name]):
            # The memory of a copy is spared: what is compared are the very tensors that were cut.
            whole = cut is None and before.shape == local.shape
            said = CHANGED if whole else "its values were changed where they were before it was cut"
        if name in self._constants:
            local.detach().fill_(self._constants[name])
        return said


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Some thousand elements, from all over the tensor; none of one without values or in parts."""
    if not _has_values(values):
        return torch.empty(0)
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 4093)].clone()


def _has_values(values: torch.Tensor) -> bool:
    return type(values) is torch.Tensor and not values.is_meta and not is_placeholder(values)


def _is_constant(values: torch.Tensor) -> bool:
    flat = values.detach().reshape(-1)
    varied = flat.numel() < 2 or not flat.is_floating_point() or bool(flat[0] != flat[-1])
    return not varied and bool((flat == flat[0]).all())


def _wrong(before: torch.Tensor | None, local: torch.Tensor, cut: Cut | None, lane: int) -> str | None:
    if before is None:
        return "the model had no such parameter before it was cut"
    if before.is_meta or is_placeholder(before):
        # Given back by an earlier generation, in which it was compared; its values are restored. Or it has none yet.
        return None
    if cut is None:
        if before.shape != local.shape:
            return "nothing says how it was cut, and it is no longer what it was"
        there = before.to(local.device, local.dtype)
        # What is not a number is no other value. Most are equal, which is found out without more memory.
        same = torch.equal(there, local) or bool(((there == local) | ((there != there) & (local != local))).all())
        return None if same else CHANGED
    if tuple(before.shape) != cut.shape:
        return f"it had the shape {list(before.shape)}, and is said to be cut of {list(cut.shape)}"
    problem = cut.problem()
    if problem is not None:
        return problem
    if tuple(local.shape) != cut.slice_shape(lane):
        return f"a slice of it has the shape {list(local.shape)}, and is said to have {list(cut.slice_shape(lane))}"
    place = 0
    for start, stop in cut.ranges[lane]:
        part = before.narrow(cut.dim, start, stop - start)
        if not torch.equal(part.to(local.device, local.dtype), local.narrow(cut.dim, place, stop - start)):
            said = f"{list(cut.ranges[lane])} of dimension {cut.dim}"
            return f"a slice of it is not the part that it is said to be, {said}"
        place += stop - start
    return None


def known_cuts(cuts: Cuts | None) -> dict[str, Cut]:
    return {name: cut for name, cut in (cuts or {}).items() if isinstance(cut, Cut)}


def unknown(module: torch.nn.Module, cuts: Cuts | None) -> UsageError | None:
    """For a model that ranks share layers of: why its slices cannot be put together; None where they can."""
    if cuts is None:
        return UsageError("the engine does not say how ranks share the model's layers: they cannot be put together")
    for name, _ in named_parameters(module):
        if isinstance(said := cuts.get(name), str):
            return UsageError(f"the slices that ranks have of {name!r} cannot be put together: {said}")
    return None


def agreed(cuts: Cuts, names: Sequence[str], every: Agreement, stages: int, stage: int) -> Cuts:
    """What all ranks can say together of the parameters `names`: slices that are not what they are said to be on one
    rank are of no use on any.

    Collective over all ranks. Ranks of one of the `stages` have the same names, cut alike.
    """
    counts = every.by_rank([stage, len(names)])
    lengths = [max(count for other, count in counts if other == number) for number in range(stages)]
    begin, flags = sum(lengths[:stage]), [False] * sum(lengths)
    flags[begin : begin + len(names)] = [isinstance(cuts.get(name), str) for name in names]
    wrong, _ = every.any_and_unequal(flags, [])
    found = dict(cuts)
    for name, flag in zip(names, wrong[begin : begin + len(names)], strict=True):
        if flag and not isinstance(found.get(name), str):
            found[name] = "on another rank it is not the part that it is said to be"
    return found

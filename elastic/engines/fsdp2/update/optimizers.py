"""Several optimizers as one, and their schedulers: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from elastic.core.errors import UsageError

# What the first of several keeps: an engine that is built anew gets the same one of them.
_SEVERAL = "_elastic_several"


class Optimizers(torch.optim.Optimizer):
    """Their parameter groups, the same dicts, one after another, and one state. Its step is theirs, in order."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Raises UsageError for optimizers that have a parameter in common."""
        self.parts = tuple(parts)
        try:
            super().__init__([group for part in self.parts for group in part.param_groups], {})
        except ValueError as error:
            raise UsageError(f"the optimizers in optimizer= have a parameter in common: {error}") from error
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Without a closure: each of them would call it."""
        if closure is not None:
            raise UsageError("several optimizers take no closure")
        for part in self.parts:
            part.step()


@dataclass(frozen=True)
class _Held:
    """No part of what a copy of the optimizer is."""

    one: Optimizers

    def __deepcopy__(self, memo: Any) -> _Held:
        return self


def one_of(given: Any) -> Any:
    """What `optimizer=` was given, several of them as one: the same one for the same ones."""
    if not isinstance(given, (list, tuple)):
        return given
    wrong = [type(each).__name__ for each in given if not isinstance(each, torch.optim.Optimizer)]
    if wrong or not given:
        raise UsageError(
            f"optimizer= takes one torch optimizer or several that were made, got {', '.join(wrong) or 'none'}"
        )
    held: _Held | None = vars(given[0]).get(_SEVERAL)
    if held is None or held.one.parts != tuple(given):
        held = _Held(Optimizers(given))
        setattr(given[0], _SEVERAL, held)
    return held.one


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Itself, where it is no more than one."""
    if not isinstance(optimizer, Optimizers):
        return (optimizer,)
    return tuple(chain.from_iterable(map(parts_of, optimizer.parts)))


class Schedulers:
    """One for each of several optimizers: a step is one of each."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def get_last_lr(self) -> list[Any]:
        return [rate for part in self.parts for rate in part.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return {str(place): dict(part.state_dict()) for place, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for place, part in enumerate(self.parts):
            part.load_state_dict(state[str(place)])


def scheduler_of(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """What `lr_scheduler=` was given: one, several, a function of the optimizer that returns such, or None."""
    made = given(optimizer) if callable(given) else given
    return Schedulers(made) if isinstance(made, (list, tuple)) else made

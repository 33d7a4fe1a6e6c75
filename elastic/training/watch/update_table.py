"""Sampled updates as a table of numbers that ranks exchange, and what comes out when a row is computed again.

Everything is fp64, which holds every narrower type exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.engines.live_state import MASTER, Master, ShardedState
from elastic.engines.optimizer.state import read_states
from elastic.training.watch.update_sample import GRADIENT, Place, Sample, is_half, stepped_again

# The parameter group, which of the values are there (not all groups of an optimizer keep the same), and the weight's
# type.
_GROUP, _THERE, _TYPE = 0, 1, 2
_FIRST = 3
_TYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class UpdateTable:
    """A row is one weight: (group, there, type, gradient, master, the optimizer's other tensors, its `numbers`, then
    after the step: there, master, other tensors). `dtypes` are those of gradient, master and other tensors; None: the
    weight's own. `numbers` has an example of each number, as this rank's optimizer has it. `groups` are the step's
    hyper-parameters."""

    dtypes: Mapping[str, torch.dtype | None]
    numbers: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, state: ShardedState, groups: Sequence[Mapping[str, Any]]) -> UpdateTable:
        """Of an optimizer that has made a step."""
        masters = state.masters()
        kept: dict[str, torch.dtype | None] = {}
        numbers: dict[str, Any] = {}
        for master, each in zip(masters, read_states(state.base, masters), strict=True):
            own = master.tensor.dtype
            kept |= {kind: None if tensor.dtype == own else tensor.dtype for kind, tensor in each.tensors.items()}
            numbers |= {key: value for key, value in each.scalars.items() if _is_number(value)}
        return cls({GRADIENT: None, MASTER: None, **dict(sorted(kept.items()))}, dict(sorted(numbers.items())), groups)

    @property
    def names(self) -> str:
        """Equal on ranks that can compare their rows."""
        return repr((list(self.dtypes), list(self.numbers)))

    @property
    def rounds(self) -> bool:
        """Is a part of the state of half precision?"""
        return any(dtype is not None and is_half(dtype) for dtype in self.dtypes.values())

    @property
    def _after(self) -> int:
        return _FIRST + len(self.dtypes) + len(self.numbers)

    @property
    def width(self) -> int:
        return self._after + len(self.dtypes)

    def kind(self, column: int) -> str:
        return [*self.dtypes][1 + column]

    def rows(self, sample: Sample, chosen: Sequence[Place], masters: Sequence[Master]) -> torch.Tensor:
        found = [self._row(sample, place, masters[place.master]) for place in chosen if place.master in sample.after]
        return torch.cat(found) if found else torch.zeros((0, self.width), dtype=torch.float64)

    def names_of(self, sample: Sample, chosen: Sequence[Place]) -> list[str]:
        """The parameter of each of `rows`."""
        return [name for place in chosen if place.master in sample.after for name in place.names]

    def again(self, base: torch.optim.Optimizer, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """(rows, 1 + columns): the part of `rows` from after the step, computed again on `device`."""
        found = torch.zeros((len(rows), self.width - self._after), dtype=torch.float64)
        # Rows of one group, type and step count are stepped together.
        columns = [_GROUP, _THERE, _TYPE, *range(_FIRST + len(self.dtypes), self._after)]
        kinds, of = rows[:, columns].unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
        for number in range(len(kinds)):
            found[of == number] = self._stepped(base, rows[of == number], device)
        return found

    def apart(self, rows: torch.Tensor, again: torch.Tensor) -> tuple[float, int, int]:
        """(the largest difference relative to the values, in which column, of which row): 0.0 only where all bits that
        count are equal. inf where only one value is finite."""
        after = rows[:, self._after :]
        both = (after[:, :1].long() & again[:, :1].long() & self._bits()) > 0
        was, is_, then = rows[:, _FIRST + 1 : _FIRST + len(self.dtypes)], after[:, 1:], again[:, 1:]
        size = torch.stack([was.abs(), is_.abs(), then.abs()]).nan_to_num(0.0, 0.0, 0.0).amax(0)
        found = ((is_ - then).abs() / size).nan_to_num(torch.inf, torch.inf)
        same = (is_ == then) | (~is_.isfinite() & ~then.isfinite()) | ~both
        found = found.masked_fill(same, 0.0)
        at = int(found.argmax())
        return float(found.reshape(-1)[at]), at % found.shape[1], at // found.shape[1]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _bits(self) -> torch.Tensor:
        return 1 << torch.arange(1, len(self.dtypes))

    def _mask(self, values: Mapping[str, Any]) -> int:
        return sum(1 << number for number, kind in enumerate((*self.dtypes, *self.numbers)) if kind in values)

    def _row(self, sample: Sample, place: Place, master: Master) -> torch.Tensor:
        before, after = sample.before[place.master], sample.after[place.master]
        numbers = {key: value for key, value in sample.numbers[place.master].items() if key in self.numbers}
        head = [master.group, self._mask({**before, **numbers}), _TYPES.index(master.tensor.dtype)]
        columns = [torch.full((len(place.at),), float(value), dtype=torch.float64) for value in head]
        columns += [_column(before.get(kind), len(place.at)) for kind in self.dtypes]
        columns += [_column(numbers.get(key), len(place.at)) for key in self.numbers]
        columns += [_column(self._mask(after), len(place.at))]
        columns += [_column(after.get(kind), len(place.at)) for kind in [*self.dtypes][1:]]
        return torch.stack(columns, 1)

    def _stepped(self, base: torch.optim.Optimizer, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        there = int(rows[0, _THERE])
        values = {
            kind: rows[:, _FIRST + number].to(device=device, dtype=dtype or _TYPES[int(rows[0, _TYPE])])
            for number, (kind, dtype) in enumerate(self.dtypes.items())
            if there >> number & 1
        }
        numbers = {
            key: _like(example, float(rows[0, _FIRST + number]))
            for number, (key, example) in enumerate(self.numbers.items(), len(self.dtypes))
            if there >> number & 1
        }
        after = stepped_again(base, self.groups[int(rows[0, _GROUP])], values, numbers)
        columns = [_column(self._mask(after), len(rows))]
        return torch.stack([*columns, *(_column(after.get(kind), len(rows)) for kind in [*self.dtypes][1:])], 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and not value.is_complex())


def _like(example: Any, value: float) -> Any:
    """`value` as the optimizer keeps it."""
    return torch.full_like(example, value) if isinstance(example, torch.Tensor) else type(example)(value)


def _column(value: Any, length: int) -> torch.Tensor:
    """One value for all rows, one for each, or none."""
    found = torch.as_tensor(0.0 if value is None else value).detach().to(device="cpu", dtype=torch.float64)
    return found.reshape(-1).expand(length) if found.numel() == 1 else found

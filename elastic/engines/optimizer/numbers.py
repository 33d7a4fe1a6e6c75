"""What an optimizer may count in: numbers and texts of its parameter groups, and its own attributes.

Snapshots have those of groups. An attribute of the optimizer is in none: a worker that joins would begin with another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic.core.errors import UsageError

# The number of a group, or None for the optimizer itself, and the key.
Key = tuple[int | None, str]
_PLAIN = (bool, int, float, str)
# torch's own, of warnings.
_OF_TORCH = frozenset({"_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"})


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[Key, Any]:
    own = ((name, value) for name, value in vars(optimizer).items() if name not in _OF_TORCH)
    found: dict[Key, Any] = {(None, name): value for name, value in own if _counts(value)}
    for number, group in enumerate(optimizer.param_groups):
        found |= {(number, key): value for key, value in group.items() if _counts(value)}
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def set_numbers(groups: Sequence[dict[str, Any]], numbers: Mapping[Key, Any]) -> None:
    """Those of groups, as `numbers_of` has given them: others are taken out of groups that have some of `numbers`.
    Tensors are filled, for others may hold them."""
    for group in {number for number, _ in numbers if number is not None}:
        for key in [key for key, value in groups[group].items() if _counts(value) and (group, key) not in numbers]:
            del groups[group][key]
    for (number, key), value in numbers.items():
        if number is None:
            continue
        if isinstance(groups[number].get(key), torch.Tensor):
            groups[number][key].fill_(value)
        else:
            groups[number][key] = value


def changed(optimizer: torch.optim.Optimizer, before: Mapping[Key, Any]) -> dict[Key, Any]:
    """Raises UsageError for attributes of the optimizer, but for flags: that it has begun, say."""
    found = {key: value for key, value in numbers_of(optimizer).items() if value != before.get(key)}
    refuse_attributes(optimizer, [key for key, value in found.items() if not isinstance(value, bool)])
    return found


def refuse_attributes(optimizer: torch.optim.Optimizer, keys: Iterable[Key]) -> None:
    """Raise UsageError where some of `keys` are no group's."""
    if own := sorted(name for number, name in keys if number is None):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} cannot be used here: its step changes {', '.join(own)}, an "
            "attribute that is in no snapshot, so that a worker that joins would have another one; count in the state "
            "of parameters or in their groups"
        )


def _counts(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, tuple):
        return all(each is None or isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)

"""What an optimizer may count in: numbers and texts of its parameter groups, and its own attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# The number of a group, or None for the optimizer itself, and the key.
Key = tuple[int | None, str]
_PLAIN = (bool, int, float, str)


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[Key, Any]:
    found: dict[Key, Any] = {(None, name): value for name, value in vars(optimizer).items() if _counts(value)}
    for number, group in enumerate(optimizer.param_groups):
        found |= {(number, key): value for key, value in group.items() if _counts(value)}
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def set_numbers(optimizer: torch.optim.Optimizer, numbers: Mapping[Key, Any]) -> None:
    """As `numbers_of` has given them. Tensors are filled, for others may hold them."""
    for (number, key), value in numbers.items():
        owner = vars(optimizer) if number is None else optimizer.param_groups[number]
        if isinstance(owner.get(key), torch.Tensor):
            owner[key].fill_(value)
        else:
            owner[key] = value


def told(key: Key) -> str:
    number, name = key
    return name if number is None else f"param_groups[{number}][{name!r}]"


def _counts(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, tuple):
        return all(each is None or isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)

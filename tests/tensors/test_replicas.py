"""What replicas compare is read from a device in one go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.training.state.replicas import numbers


def test_a_device_is_waited_for_once_however_many_numbers_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    for name in ("tolist", "item", "__float__", "__int__", "cpu"):
        real = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *more: Any, name: str = name, real: Any = real) -> Any:
            reads.append(name)
            return real(tensor, *more)

        monkeypatch.setattr(torch.Tensor, name, read)
    values = [torch.tensor(float(at)) for at in range(40)]
    assert numbers([*values, "a name", 7]) == [*map(float, range(40)), "a name", 7]
    assert reads == ["tolist"]

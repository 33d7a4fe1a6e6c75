"""What `elastic.report` takes: values that can be written, converted where they are handed over."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import pytest

from elastic.core.data.metrics import plain
from elastic.core.errors import UsageError


class Tensor:
    """As a tensor or an array looks to this module."""

    def __init__(self, value: Any, shape: tuple[int, ...] = ()) -> None:
        self._value, self.shape = value, shape

    def item(self) -> Any:
        return self._value


class Level(IntEnum):
    LOW = 3


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1, 1), (True, True), (None, None), (2.5, 2.5), ("a", "a"), (Level.LOW, 3), (Tensor(0.5), 0.5),
        (Tensor(0.5, (1, 1)), 0.5), ([1, Tensor(2)], [1, 2]), ((1, 2), [1, 2]),
        ({"a": {1: Tensor(2)}}, {"a": {"1": 2}}),
        ("\ud800", "\\ud800"),
    ],
)  # fmt: skip
def test_values_become_plain(value: Any, kept: Any) -> None:
    found = plain("m", value)
    assert found == kept
    assert type(found) is type(kept)
    json.dumps(found, ensure_ascii=False).encode()


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "the metric 'm' is a builtins.object, which cannot be written"),
        (Tensor(0, (3, 2)), r"Tensor of shape \(3, 2\); report a number, for example its mean"),
        (Tensor(1j), "whose value is a complex"),
        (b"bytes", "builtins.bytes, which cannot be written"),
        (2**70, "more than 64 bits"),
        ("x" * 20_000, "a text of 20000 characters"),
        (LOOP, "builtins.list"),
        (Tensor(Tensor(1)), "whose value is a Tensor"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plain("m", value)

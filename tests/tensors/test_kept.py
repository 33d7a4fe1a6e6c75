"""What is made once for each process, and what is refused because it could not be told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elastic
from elastic.core.errors import UsageError


def in_a_training_function() -> Callable[..., Any]:
    """A new function at every call, as in a training function that is called again."""

    def load(calls: list[int], size: int) -> object:
        calls.append(size)
        return object()

    return load


def test_equal_arguments_give_the_same_object() -> None:
    first = elastic.keep(in_a_training_function(), [], size=3)
    assert elastic.keep(in_a_training_function(), [], size=3) is first
    assert elastic.keep(in_a_training_function(), [], size=4) is not first


def test_arguments_are_compared_as_they_were() -> None:
    config = {"rows": 1}
    first = elastic.keep(dict, config)
    config["rows"] = 2
    assert elastic.keep(dict, config) is not first
    assert elastic.keep(dict, {"rows": 1}) is first


def test_a_closure_is_refused() -> None:
    size = 3
    with pytest.raises(UsageError, match="uses size of the function around it"):
        elastic.keep(lambda: size)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(1, 1), lambda: torch.optim.SGD([torch.zeros(1)], lr=1.0)])
def test_what_an_engine_changes_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="are built anew"):
        elastic.keep(make)


def test_arguments_that_cannot_be_compared_are_refused() -> None:
    elastic.keep(len, torch.zeros(2))
    with pytest.raises(UsageError, match="cannot be compared"):
        elastic.keep(len, torch.ones(2))

"""Unit tests are pure or touch one disk: none of them may start Ray."""

from __future__ import annotations

import sys
from typing import NoReturn

import pytest
from hypothesis import settings

# Two busy cores make any deadline a coin toss; how long an example takes says nothing about it being right.
settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = sys.modules.get("ray")
    if ray is not None:

        def refuse(*args: object, **kwargs: object) -> NoReturn:
            raise AssertionError("a unit test must not start Ray")

        monkeypatch.setattr(ray, "init", refuse)

"""Unit tests are pure or touch one disk: none of them starts Ray, and those that need tensors have their own folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

HERE = Path(__file__).resolve().parent
PURE = (HERE, HERE.parent / "simulation")


def pytest_collection_finish(session: pytest.Session) -> None:
    """torch takes longer to import than most of these tests take together."""
    alone = all(any(item.path.is_relative_to(folder) for folder in PURE) for item in session.items)
    if alone and "torch" in sys.modules:
        raise pytest.UsageError("a pure test imports torch: it belongs into tests/tensors")


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = sys.modules.get("ray")
    if ray is not None:

        def refuse(*args: object, **kwargs: object) -> NoReturn:
            raise AssertionError("a unit test must not start Ray")

        monkeypatch.setattr(ray, "init", refuse)

"""What an unknown key was probably meant to be."""

from __future__ import annotations

import pytest

from elastic.core.nearest import nearest_key

_KEYS = {(): ["workers", "checkpoint"], ("checkpoint",): ["url", "every_steps", "x"], ("memory",): ["every_mb", "x"]}


@pytest.mark.parametrize(
    ("key", "section", "clause"),
    [
        ("worker", (), "did you mean 'workers'?"),
        ("url", (), "'url' belongs under 'checkpoint'"),
        ("workers", ("memory",), "'workers' belongs at the top level"),
        # A key of several sections says nothing about where it belongs.
        ("x", (), "did you mean 'workers'?"),
        ("num_workers", (), "did you mean 'workers'?"),
        ("anything", ("elsewhere",), "it takes no keys"),
    ],
)
def test_the_nearest_key(key: str, section: tuple[str, ...], clause: str) -> None:
    assert nearest_key(key, section, _KEYS) == clause

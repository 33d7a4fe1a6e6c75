"""What `elastic.planner` exports."""

from __future__ import annotations

import elastic.planner


def test_all_names_exist_once() -> None:
    names = elastic.planner.__all__
    assert all(hasattr(elastic.planner, name) for name in names)
    assert len(set(names)) == len(names)

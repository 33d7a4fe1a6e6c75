"""The garbage collector is off where it is in the way, and comes by itself everywhere else."""

from __future__ import annotations

import gc

import pytest

from elastic.core.checkpoint import manifest_json
from elastic.core.collector import hide_objects, no_collection
from elastic.core.errors import IntegrityError


def test_no_cycles_are_looked_for_inside_and_afterwards_all_is_as_before() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_manifest_is_read_without_it_and_one_that_is_refused_leaves_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(manifest_json, "_manifest", lambda body, *_: seen.append(gc.isenabled()))
    monkeypatch.setattr(manifest_json, "_check", lambda text: "")
    manifest_json.from_json('{"format": 1, "check": "", "manifest": {}}')
    assert seen == [False]
    with pytest.raises(IntegrityError):
        manifest_json.from_json("{}")
    assert gc.isenabled()


def test_objects_that_are_hidden_do_not_put_off_the_next_full_collection() -> None:
    """Seen: after 200 engines the cycles of all of them were still there, as torch's million objects counted."""

    def full() -> int:
        return int(gc.get_stats()[2]["collections"])

    hidden: list[list[int]] = [[] for _ in range(1_000_000)]
    hide_objects()
    try:
        before = full()
        later: list[list[int]] = [[] for _ in range(150_000)]
        assert full() > before
    finally:
        gc.unfreeze()
    assert len(hidden) + len(later) == 1_150_000

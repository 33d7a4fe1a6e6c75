"""The garbage collector is off inside, and afterwards as it was before."""

from __future__ import annotations

import gc

import pytest

from elastic.core.checkpoint import manifest_json
from elastic.core.collector import no_collection
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

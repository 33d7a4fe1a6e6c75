from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from elastic.engines.when_imported import forget, when_imported


def test_now_where_it_is_loaded() -> None:
    seen: list[str] = []
    when_imported("json", lambda module: seen.append(module.__name__))
    assert seen == ["json"]


def test_later_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("awaited_later", "forgotten_later"):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    seen: list[int] = []
    when_imported("awaited_later", lambda module: seen.append(module.VALUE))
    when_imported("forgotten_later", lambda module: seen.append(-1))
    forget("forgotten_later")
    assert seen == []
    importlib.import_module("forgotten_later")
    importlib.import_module("awaited_later")
    assert seen == [1]
    # Once.
    monkeypatch.delitem(sys.modules, "awaited_later")
    importlib.import_module("awaited_later")
    assert seen == [1]


def test_once_for_each_purpose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "awaited_twice.py").write_text("VALUE = 1\n")
    seen: list[str] = []
    when_imported("awaited_twice", lambda _: seen.append("one"), "one")
    when_imported("awaited_twice", lambda _: seen.append("other"), "other")
    when_imported("awaited_twice", lambda _: seen.append("one, later"), "one")
    importlib.import_module("awaited_twice")
    assert seen == ["one, later", "other"]

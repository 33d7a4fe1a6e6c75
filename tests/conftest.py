"""Of all tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

# Busy cores make any deadline a coin toss; how long an example takes says nothing about it being right.
settings.register_profile("here", deadline=None, print_blob=True)
settings.load_profile("here")

# Libraries that are tested report to nobody from here (TRL tells which Trainer is made); their processes inherit it.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# CI has a limit for all of its tests. Those that are left then are named as skipped; else a machine that is slower than
# usual would get no verdict at all. So that they are not always the same, any number says with which file to begin.
_UNTIL = float(os.environ.get("ELASTIC_TESTS_UNTIL", "inf"))
_FROM = int(os.environ.get("ELASTIC_TESTS_FROM", "0"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > _UNTIL:
        pytest.skip(f"{item.path.name}: the time that ELASTIC_TESTS_UNTIL allows (seconds since 1970) is over")


_FIRST: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("first.yaml").read_text())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What first.yaml does not name of its levels is wide. Raises UsageError where it names what is not there."""
    levels, found = {file.partition("/")[0] for file in _FIRST}, set[tuple[str, str]]()
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        names = {item.name, getattr(item, "originalname", item.name)}
        found |= {(file, name) for name in names}
        if file.partition("/")[0] in levels and not names & set(_FIRST.get(file, ())):
            item.add_marker(pytest.mark.wide)
    # A test that is asked for by its name, or because it failed, comes without the others of its file.
    some = config.getoption("lf") or any("::" in argument for argument in config.args)
    whole = set() if some else {file for file, _ in found}
    if lost := [f"{file}::{name}" for file in whole for name in _FIRST.get(file, ()) if (file, name) not in found]:
        raise pytest.UsageError(f"tests/first.yaml names what is not there: {', '.join(sorted(lost))}")
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path] - _FROM) % len(files))

"""Of all tests."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import settings

# Busy cores make any deadline a coin toss; how long an example takes says nothing about it being right.
settings.register_profile("here", deadline=None, print_blob=True)
settings.load_profile("here")

# CI has a limit for all of its tests. Those that are left then are named as skipped; else a machine that is slower than
# usual would get no verdict at all.
_UNTIL = float(os.environ.get("ELASTIC_TESTS_UNTIL", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > _UNTIL:
        pytest.skip("the time that ELASTIC_TESTS_UNTIL allows (seconds since 1970) is over")

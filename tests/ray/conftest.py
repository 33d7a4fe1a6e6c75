"""One cluster of four nodes per module; every test begins with all four and leaves nothing of its run behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before Ray is imported: it warns where this choice was not made.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A test that has lost its cluster must fail, and not be given a new one by the next call.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import harness
import pytest
from elastic_cluster import LocalCluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Four nodes with room for one worker each."""
    yield from harness.module_cluster(4, cpus_per_node=1)


@pytest.fixture
def cluster(nodes: LocalCluster) -> Iterator[LocalCluster]:
    """The module's cluster, whole."""
    yield from harness.each_test(nodes)

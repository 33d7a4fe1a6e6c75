"""One cluster of four nodes; every test begins with all four and leaves nothing of its run behind."""

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


@pytest.fixture(scope="session")
def four_nodes() -> Iterator[LocalCluster]:
    """One cluster for all tests that ask for no other; its workers are forks, see forking_node."""
    yield from harness.own_cluster(4, cpus_per_node=1, environment=harness.FORKING)


@pytest.fixture(scope="module")
def nodes(four_nodes: LocalCluster) -> Iterator[LocalCluster]:
    """Four nodes with room for one worker each."""
    yield from harness.joined(four_nodes)


@pytest.fixture
def cluster(nodes: LocalCluster) -> Iterator[LocalCluster]:
    """The cluster, whole."""
    yield from harness.each_test(nodes)

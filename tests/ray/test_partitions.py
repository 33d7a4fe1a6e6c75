"""Nodes that are alive and cannot reach each other, with real cuts between network namespaces.

Four nodes: the head, where the controller is alone, and three with a worker each. Where namespaces are not permitted,
these tests are skipped and say why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
from afar import AfarRun, Cluster
from harness import given_samples, wait_until

from cluster import processes
from elastic.core.names import parse_checkpoint_id
from elastic.core.settings import ScalingSettings

pytestmark = pytest.mark.ray

HEAD = 0
# A cut of two seconds may be felt for more than three: what was sent meanwhile is sent again in growing intervals.
BLIP_S = 2.0
PATIENT = {"suspect_after_s": 6.0, "probe_timeout_s": 1.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.Network.made(4) as network, Cluster.up(network) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    nodes.whole()
    yield nodes
    nodes.network.heal_all()
    try:
        wait_until(lambda: not nodes.left(), "the processes of the run to be gone", 30.0)
    except AssertionError:
        left = nodes.left()
        nodes.clear()
        raise AssertionError(f"the test has left {left}") from None


def _begun(cluster: Cluster, folder: Path, failures: dict[str, float], **options: Any) -> AfarRun:
    """All three train, and have done six steps; the next is allowed by the test."""
    options = {"epochs": 12, **options}
    run = AfarRun(cluster, folder, scaling=ScalingSettings(2, 3), failures=failures, **options)
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_checkpoint(5)
    return run


def _walk_for(run: AfarRun, seconds: float) -> None:
    """How long a fault lasts; training goes on meanwhile, where it can."""
    until = time.monotonic() + seconds
    run.walk_until(lambda: time.monotonic() > until, f"{seconds:g} s to pass")


def _walk_to(run: AfarRun, world_size: int, steps: int = 3) -> None:
    """Until a generation of that size has done so many steps."""

    def there() -> bool:
        now = run.handle.progress()
        if now["world_size"] != world_size or now["doing"] is not None:
            done.clear()
        done.append(now["step"])
        return done[-1] - done[0] >= steps

    done: list[int] = []
    run.walk_until(there, f"{steps} steps at world size {world_size}")


def test_a_short_cut_is_no_incident(cluster: Cluster, tmp_path: Path) -> None:
    """Of a worker's node from everything, then of the controller from everybody."""
    run = _begun(cluster, tmp_path, PATIENT)
    victim = cluster.number(run.worker(1)["node"])
    for node in (victim, HEAD):
        before = run.handle.progress()["step"]
        cluster.network.isolate(node)
        _walk_for(run, BLIP_S)
        cluster.network.heal_all()
        run.allow(before + 10)
        run.reach(before + 10)
    assert len(run.summary()["generations"]) == 1
    run.finish()

    run.assert_whole()
    assert run.incidents() == []
    assert [generation["world_size"] for generation in run.summary()["generations"]] == [3]

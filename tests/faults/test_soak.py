"""Hours of a real cluster's failures, compressed: `make soak HOURS=2`. Skipped unless ELASTIC_SOAK_HOURS says how many.

The outages of 400 servers over 349 days (`tests/data/infinitehbd`) strike, in their order and at their distances, the
nodes of a local cluster in turn. Every eighth is silent: the node is frozen, as with Llama 3. A node comes back as long
after as the trace says, by the same scale, but not before the run has noticed the loss.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster, NodeState
from harness import Run, module_cluster

from elastic.core.settings import ScalingSettings

HOURS = float(os.environ.get("ELASTIC_SOAK_HOURS", "0"))
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not HOURS, reason="ELASTIC_SOAK_HOURS is not set"),
    pytest.mark.timeout(HOURS * 3600 + 1200),
]

TRACE = Path(__file__).parent.parent / "data" / "infinitehbd" / "faults.json"
NODES, LEAST = 4, 2
# Shorter than that a node is not away; longer than that it would keep the others from being struck.
AWAY_S = (10.0, 60.0)
# Two outages closer to each other than that are one: the run would have too few nodes for both.
APART_S = 15.0
SILENT = 8
PACE_S = 0.2


@dataclass(frozen=True)
class Outage:
    begin_s: float
    away_s: float
    silent: bool


def outages(hours: float) -> Iterator[Outage]:
    """The whole trace in so many hours."""
    rows = json.loads(TRACE.read_text())
    scale = hours * 3600 / max(row[2] for row in rows)
    before = 0.0
    for number, (_, start, end, _) in enumerate(sorted(rows, key=lambda row: row[1])):
        if start * scale - before >= APART_S:
            before = start * scale
            away_s = min(max((end - start) * scale, AWAY_S[0]), AWAY_S[1])
            yield Outage(before, away_s, number % SILENT == 0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    yield from module_cluster(NODES, cpus_per_node=1)


def test_a_run_lives_through_the_failures_of_a_year(cluster: LocalCluster, tmp_path: Path, lines: list[str]) -> None:
    scaling = ScalingSettings(LEAST, NODES)
    config = {"size": int(HOURS * 3600 / PACE_S * 20) + 1000, "pace_s": PACE_S}
    run = Run(
        cluster, tmp_path, config=config, memory={"every_steps": 1}, every_steps=200, epochs=1, scaling=scaling,
        failures={"quarantine_s": 5.0, "quarantine_limit_s": 5.0},
    )  # fmt: skip
    run.start()
    run.reach(6)
    struck = _strike(run, cluster)
    run.handle.stop("the soak is over")
    run.ended("stopped")

    ledger, incidents = run.records("samples")[-1], run.incidents()
    lost = [incident for incident in incidents if incident["lost_nodes"]]
    repeated = sum(incident["steps_repeated"] for incident in incidents)
    lines.append(
        f"{struck} nodes struck, {len(lost)} incidents with a lost node, {max(run.steps())} steps, {repeated} repeated"
    )
    ways: dict[str, list[int]] = {}
    for incident in lost:
        way = f"{len(incident['lost_nodes'])} lost, from {incident['source'] or 'their own state'}"
        ways.setdefault(way, []).append(incident["steps_repeated"])
    lines += [
        f"{way}: {len(steps)} incidents, {sum(steps)} steps repeated, {max(steps)} at most"
        for way, steps in sorted(ways.items())
    ]
    assert (ledger["missing"], ledger["repeated"]) == (0, 0)
    assert lost
    run.assert_time_is_accounted_for()
    run.assert_generations_are_told()


def _strike(run: Run, cluster: LocalCluster) -> int:
    """All outages, at their times; returns how many nodes were struck."""
    began, struck, turns = time.monotonic(), 0, itertools.count(1)
    back: list[tuple[float, str]] = []
    for outage in outages(HOURS):
        _wait(run, cluster, began + outage.begin_s, back)
        name = f"node-{next(turns) % (NODES - 1) + 1}"
        alive = [node for node in cluster.nodes() if node.state is NodeState.ALIVE]
        if len(alive) <= LEAST or cluster.node(name).state is not NodeState.ALIVE:
            continue
        struck += 1
        (cluster.freeze_node if outage.silent else cluster.kill_node)(name)
        heapq.heappush(back, (time.monotonic() + outage.away_s, name))
    _wait(run, cluster, began + HOURS * 3600, back)
    while back:
        _revive(cluster, heapq.heappop(back)[1])
    return struck


def _wait(run: Run, cluster: LocalCluster, until: float, back: list[tuple[float, str]]) -> None:
    """Nodes come back meanwhile; the run has to live."""
    while (left_s := until - time.monotonic()) > 0:
        assert run.handle.result(min(left_s, 1.0)) is None, f"the run has ended; {run.told()}"
        while back and back[0][0] <= time.monotonic():
            _revive(cluster, heapq.heappop(back)[1])


def _revive(cluster: LocalCluster, name: str) -> None:
    if cluster.node(name).state is NodeState.FROZEN:
        cluster.thaw_node(name)
    else:
        cluster.add_node(name)

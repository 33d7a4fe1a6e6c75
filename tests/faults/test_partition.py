"""A node that the controller does not reach, by a real cut between network namespaces, judged like every other fault.

Four nodes: the head, where the controller is alone, and three with a worker each. Where namespaces are not permitted,
the test is skipped and says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from afar import PATIENT, Cluster, assert_unheard, begun, each_test, walk_to
from elastic_cluster.local import processes
from harness import wait_until
from judge import WORLD_SIZE, Judge

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HEAD = 0


@pytest.fixture(scope="module")
def away() -> Iterator[Cluster]:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.Network.made(WORLD_SIZE + 1) as network, Cluster.up(network) as cluster:
        yield cluster


@pytest.fixture
def cluster(away: Cluster) -> Iterator[Cluster]:
    yield from each_test(away)


def test_a_node_cut_from_the_controller_is_left_behind_and_comes_back_as_a_newcomer(
    cluster: Cluster, judge: Judge, tmp_path: Path
) -> None:
    run = begun(cluster, tmp_path, PATIENT)
    cut = run.worker(2)
    node = cluster.number(cut["node"])
    struck_at = time.time()
    cluster.network.cut(HEAD, node)
    # The workers reach each other, so all of them do these steps, and every shard of the next checkpoint is written:
    # also that of which the controller does not hear while it counts.
    run.allow(10)
    unheard = tmp_path / "runs" / "run" / "checkpoints" / "step-00000010-g0001"
    wait_until(lambda: len(list(unheard.glob("rank-*.safetensors"))) == 3, "all three shards of step 10 to be written")
    run.wait_generation(2)
    run.allow(20)
    run.reach(20)
    assert run.handle.progress()["world_size"] == 2
    cluster.network.heal(HEAD, node)
    wait_until(lambda: processes.read(cut["pid"]) is None, "the process that was cut off to be gone")
    walk_to(run, 3)
    run.finish()

    judge.judge(run, "a node is cut from the controller, without snapshots", struck_at)
    (incident,) = (incident for incident in run.incidents() if not incident["planned"])
    assert (incident["lost_workers"], incident["lost_nodes"]) == ([cut["worker"]], [cut["node"]])
    assert (incident["resumed_step"], incident["steps_repeated"]) == (5, 5)
    assert "step-00000010-g0001" not in [record["id"] for record in run.records("checkpoint")]
    assert "step-00000010-g0002" in [record["id"] for record in run.records("checkpoint")]
    assert_unheard(run, cut["worker"], 2)

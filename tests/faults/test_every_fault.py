"""Every kind of fault on real raylets, one run of three workers each, judged by the same judge."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from elastic_cluster.local import processes
from harness import Run, actor_processes, given_samples, something_in_the_way, wait_until
from judge import EPOCHS, WORLD_SIZE, Judge

from elastic.core.data.samples import SampleOrder
from elastic.core.data.steps import Range
from elastic.core.settings import ScalingSettings
from elastic.runtime.driver import client
from elastic.runtime.driver.controller_placement import Place

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MEMORY = {"every_steps": 1}
# The steps that meet the bad sample, once in each epoch; what was skipped before moves the later ones.
BAD_STEPS = ((70, 80), (210, 220), (310, 320))


@dataclass(frozen=True)
class Fault:
    """`strike` returns when it struck (None: the first symptom tells), once the run is past it."""

    name: str
    strike: Callable[[Run, LocalCluster], float | None]
    entry: str = "loops:train"
    noticed_by: str = ""
    skips: tuple[Range, ...] = ()
    # Looked at when the run has finished.
    after: Callable[[Run], None] = lambda run: None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def worker_killed(run: Run, cluster: LocalCluster) -> float:
    struck_at = time.time()
    cluster.kill_worker(run.worker(run.away_from_head()[0])["pid"])
    run.wait_generation(2)
    return struck_at


def node_killed(run: Run, cluster: LocalCluster) -> float:
    struck_at = time.time()
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(2)
    return struck_at


def node_frozen(run: Run, cluster: LocalCluster) -> float:
    frozen, node = run.worker(run.away_from_head()[0]), run.node_of(run.away_from_head()[0])
    struck_at = time.time()
    cluster.freeze_node(node.name)
    run.wait_generation(2)
    cluster.thaw_node(node.name)
    wait_until(lambda: processes.read(frozen["pid"]) is None, "the late waker's process to be gone")
    return struck_at


def agent_stopped(run: Run, cluster: LocalCluster) -> float:
    """Its worker answers every probe. A snapshot that is due would hold it, so none is before step 30."""
    node = run.node_of(run.away_from_head()[0])
    (agent,) = (pid for pid, title in actor_processes(cluster).items() if "AgentActor" in title and pid in node.pids)
    struck_at = time.time()
    os.kill(agent, signal.SIGSTOP)

    def lost() -> bool:
        run.allow(min(run.waiting_at + 1, 29))
        return run.handle.result(0.4) is not None or run.handle.progress()["generation"] > 1

    wait_until(lost, "the node to be given up")
    run.wait_generation(2)
    incident = run.wait_for("the incident to be told", lambda _: run.incidents())[0]
    assert "times in a row, although its workers answer" in incident["evidence"]
    assert incident["step"] > 10, "the worker has trained meanwhile"
    # That its process is ended, too, the cluster's fixture looks at in the end.
    run.allow(30)
    run.reach(30)
    run.wait_snapshot(30)
    return struck_at


def rank_hangs(run: Run, cluster: LocalCluster) -> float:
    run.allow(9)
    run.wait_generation(2)
    return (run.folder / "did-hang").stat().st_mtime


def rank_slow(run: Run, cluster: LocalCluster) -> float:
    rank = run.away_from_head()[0]
    slow = run.worker(rank)
    (run.folder / "slow").write_text(str(rank))
    run.allow(1 << 30)
    run.wait_generation(2)
    run.wait_for("its node to be quarantined", lambda _: run.decisions("quarantine"))
    assert f"node {slow['node'][:8]} is quarantined" in run.decisions("quarantine")[0]
    found = [record for record in run.records("decision") if record["kind"] == "straggler"]
    assert {record["data"]["worker"] for record in found} == {slow["worker"]}
    assert all(record["data"]["factor"] > 2.0 for record in found)
    return (run.folder / "slow").stat().st_mtime


def rank_slow_after(run: Run) -> None:
    assert [event["confirmed"] for event in run.events("StragglerFound")] == [False, True]
    evicted = run.incidents()[0]
    assert (evicted["kind"], evicted["planned"], evicted["source"]) == ("resize", True, "memory")
    # What the others have waited for it has an owner.
    assert run.records("ledger")[-1]["seconds"]["straggler excess"] > 1.0


def loss_not_finite(run: Run, cluster: LocalCluster) -> None:
    run.allow(9)
    run.wait_generation(2)
    assert "samples 70 to 79 are skipped" in run.decisions("anomaly")[0]


def wrong_numbers(run: Run, cluster: LocalCluster, kind: str = "") -> None:
    """Twice: the second time the node is left."""
    node = run.worker(run.away_from_head()[0])["node"]
    (run.folder / "wrong").write_text(f"{node} {run.waiting_at} {kind}".strip())
    run.allow(1 << 30)
    run.wait_generation(3)
    run.wait_for("its node to be left", lambda _: "2 audits have named it" in " ".join(run.decisions("audit")))
    named = [record["data"] for record in run.records("decision") if record["kind"] == "audit"]
    assert named[0] | {"decided": True, "nodes": [node]} == named[0]
    assert f": {kind} of " in run.decisions("audit")[0] or not kind


def controller_killed(run: Run, cluster: LocalCluster) -> float:
    before = run.handle.progress()
    struck_at = time.time()
    cluster.kill_process(before["controller_pid"])
    run.allow(16)
    # Told by the workers' own files: nobody else is needed for a step.
    wait_until(lambda: len(given_samples(run.folder).get(16, {}).get(1, {})) == WORLD_SIZE, "the workers to train on")
    run.reach(16)
    assert run.handle.progress()["controller_pid"] != before["controller_pid"]
    return struck_at


def control_store_killed(run: Run, cluster: LocalCluster) -> float:
    """A node is lost while it is away."""
    cluster.kill_control_store()
    run.allow(12)
    run.wait_for("the outage to be told", lambda _: run.decisions("control-store"))
    run.reach(12)
    struck_at = node_killed(run, cluster)
    cluster.restart_control_store()
    run.wait_for("the end of the outage to be told", lambda _: len(run.decisions("control-store")) == 2)
    return struck_at


def storage_away(run: Run, cluster: LocalCluster) -> float:
    """A node is lost while it is away, and what should have been saved meanwhile is saved when it is back."""
    run.wait_checkpoint(5)
    with something_in_the_way(Path(run.url) / "run" / "checkpoints"):
        run.allow(11)
        run.wait_for("a save to fail", lambda _: run.events("SaveFailing"))
        struck_at = node_killed(run, cluster)
    return struck_at


HANG = {"fault": {"kind": "hang-once", "rank": 1, "step": 8}}
PATIENCE = {"hang_floor_s": 5.0, "join_timeout_s": 60.0}
# Wide enough for a machine whose cores all ranks share: the slow one takes four times as long.
EVICT = {"policy": "evict", "window_steps": 3, "windows": 2, "calibration_windows": 1, "factor": 2.0}
AUDIT = {"audit": {"every_steps": 3}}
NOT_FINITE = {"bad": [SampleOrder(127, 0).at(75)[1]]}
FAULTS = (
    Fault("a worker's process is killed", worker_killed),
    Fault("a node is killed", node_killed),
    Fault("a node is frozen, and thawed later", node_frozen),
    Fault("a node's agent stands still", agent_stopped, options={"memory": {"every_steps": 30}, "every_steps": 5}),
    Fault("a rank hangs", rank_hangs, config=HANG, options={"failures": PATIENCE}),
    Fault("a rank is slow", rank_slow, "busy:train", after=rank_slow_after, options={"stragglers": EVICT}),
    Fault("a loss is NaN", loss_not_finite, "bad_samples:train", skips=BAD_STEPS, config=NOT_FINITE),
    # In every step: what is wrong before the next audit stays in the weights.
    Fault(
        "a node computes wrong gradients",
        wrong_numbers,
        "miscomputing:train",
        options={"audit": {"every_steps": 1}},
    ),
    *(
        Fault(
            f"a bit of {what} flips in memory",
            partial(wrong_numbers, kind=kind),
            "miscomputing:train_in_faulty_memory",
            options=AUDIT,
        )
        for what, kind in (("a master", "master"), ("a moment", "exp_avg_sq"))
    ),
    Fault("the controller is killed", controller_killed, noticed_by="Ray, which restarts it"),
    Fault("the head's control store is away, and a node is killed", control_store_killed),
    Fault(
        "storage is away, and a node is killed",
        storage_away,
        options={"every_steps": 5, "failures": {"storage_backoff_s": 0.5}},
    ),
)


def _started(cluster: LocalCluster, folder: Path, fault: Fault) -> Run:
    options = {
        "memory": MEMORY, "every_steps": None, "epochs": EPOCHS, "scaling": ScalingSettings(2, WORLD_SIZE),
        **fault.options,
    }  # fmt: skip
    run = Run(cluster, folder, fault.entry, config=fault.config, **options)
    run.allow(6)
    run.start()
    run.reach(6)
    if options["memory"] == MEMORY:
        run.wait_snapshot(6)
    return run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_run_through_a_fault_is_the_undisturbed_run(
    cluster: LocalCluster, judge: Judge, tmp_path: Path, fault: Fault
) -> None:
    run = _started(cluster, tmp_path, fault)
    struck_at = fault.strike(run, cluster)
    run.finish()
    judge.judge(run, fault.name, struck_at, fault.skips, fault.noticed_by)
    fault.after(run)


def test_a_controller_that_wakes_up_on_a_thawed_node_leaves_its_successor_alone(
    cluster: LocalCluster, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are one actor to Ray: killing "the current actor" would kill the healthy one for good."""
    # As on a cluster of several machines, where it is kept off the head.
    away = cluster.nodes()[-1]
    monkeypatch.setattr(client, "choose", lambda *_: Place(away.node_id, False, "this test wants it there"))
    fault = Fault("the controller's node is frozen, and thawed later", node_frozen)
    run = _started(cluster, tmp_path, fault)
    before = run.handle.progress()
    assert before["controller_pid"] in cluster.node(away.name).pids
    struck_at = time.time()
    cluster.freeze_node(away.name)
    run.wait_generation(2)
    now = run.handle.progress()
    assert now["controller_pid"] != before["controller_pid"]
    kept = {w["pid"] for w in before["workers"] if w["node"] != away.node_id}
    assert {w["pid"] for w in now["workers"]} >= kept, "the survivors' processes continue"
    cluster.thaw_node(away.name)
    wait_until(lambda: processes.read(before["controller_pid"]) is None, "the old controller to end")
    run.allow(run.waiting_at + 5)
    run.reach(run.waiting_at)
    assert run.handle.progress()["controller_pid"] == now["controller_pid"]
    run.finish()
    judge.judge(run, fault.name, struck_at)
    assert (run.summary()["controllers"], run.summary()["attempts"]) == (2, 1)

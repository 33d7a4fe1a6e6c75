"""The head goes away: Ray's control store while workers train, the controller's node, the whole cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import HERE, LIMIT_S, PACKAGES, Run, given_samples, module_cluster, wait_until

from elastic.runtime.driver import client

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """As elsewhere, but the control store can be killed, and a node that is gone is noticed after 3 s, not 14."""
    noticed = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
    yield from module_cluster(4, cpus_per_node=1, durable_control_store=True, system_config=noticed)


def _trained(folder: Path, step: int, generation: int, world_size: int) -> bool:
    """Told by the workers' own files: nobody else is needed for a step."""
    return len(given_samples(folder).get(step, {}).get(generation, {})) == world_size


def test_training_goes_on_without_the_control_store_and_a_node_that_is_lost_meanwhile_is_recovered_from(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, epochs=4)
    run.allow(6)
    run.start()
    run.reach(6)
    before = run.handle.progress()

    cluster.kill_control_store()
    run.allow(16)
    wait_until(lambda: _trained(tmp_path, 16, 1, 4), "the workers to train on")
    now = run.handle.progress()
    assert now["generation"] == 1
    assert now["controller_pid"] == before["controller_pid"]
    assert [w["pid"] for w in now["workers"]] == [w["pid"] for w in before["workers"]]
    run.wait_for("the outage to be told", lambda _: run.decisions("control-store"))

    lost = run.node_of(run.away_from_head()[0])
    cluster.kill_node(lost.name)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 3
    run.allow(run.waiting_at + 5)
    run.reach(run.waiting_at)
    # Its slot has been asked for again, and whatever asks the control store waits.
    assert len(run.decisions("control-store")) == 1

    cluster.restart_control_store()
    run.wait_for("the end of the outage to be told", lambda _: len(run.decisions("control-store")) == 2)
    # By its name, as anybody would who comes now.
    again = client.attach("run", cluster.address)
    assert again.progress()["controller_pid"] == before["controller_pid"]
    cluster.add_node(lost.name)
    run.grow_to(4)
    run.finish()

    run.assert_whole()
    away, back = run.decisions("control-store")
    assert "has not answered for" in away
    assert "training continues" in away
    assert "answers again, after" in back
    summary = run.summary()
    assert summary["controllers"] == 1
    assert [generation["world_size"] for generation in summary["generations"]] == [4, 3, 4]
    (incident,) = (incident for incident in run.incidents() if not incident["planned"])
    assert incident["kind"] == "node-lost"
    assert incident["steps_repeated"] <= 1


_JOB = """
entry_point: loops:train
min_workers: 2
max_workers: 2
epochs: 2
seed: 0
config: {{size: 127, batch: 10, folder: {folder}}}
checkpoint: {{every_steps: 5}}
"""


@pytest.mark.slow
def test_a_run_whose_whole_cluster_is_killed_goes_on_from_storage_on_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "loops.py").symlink_to(HERE / "loops.py")
    (tmp_path / "job.yaml").write_text(_JOB.format(folder=tmp_path))
    run = Run(_NoCluster(), tmp_path, run_id="lost")
    run.allow(14)
    with _elastic("run", "job.yaml", "--run-id", "lost", "--nodes", "2", folder=tmp_path) as first:
        run.wait_checkpoint(10)
        wait_until(lambda: _trained(tmp_path, 14, 1, 2), "step 14")
        run.wait_for("the losses before the end", lambda _: 12 in run.losses())
        before = run.losses()
        socket = Path(json.loads((tmp_path / "runs/lost/live.json").read_text())["cluster_socket"])
        first.kill()
    # With its owner a local cluster is killed as a whole.
    wait_until(lambda: not socket.parent.exists(), "the cluster to be gone")

    run.allow(1 << 30)
    with _elastic("resume", "lost", "--nodes", "2", "--json", folder=tmp_path) as second:
        printed, told = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, told
    assert json.loads(printed)["status"] == "finished"
    run.assert_samples_once()
    assert run.summary()["attempts"] == 2
    # Steps after the checkpoint were done twice: once by each cluster, from the same state, with the same samples.
    after = run.losses()
    both = [step for step in before if step > 10]
    assert len(both) >= 2
    assert [after[step] for step in both] == pytest.approx([before[step] for step in both], rel=1e-6)


def _elastic(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([PACKAGES, str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "ELASTIC_STORAGE": str(folder / "runs")}
    command = [sys.executable, "-m", "elastic_jobs.cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


class _NoCluster:
    """The cluster is somebody else's here; what is looked at is what it leaves behind."""

    address = ""

    def nodes(self) -> tuple[Any, ...]:
        return ()

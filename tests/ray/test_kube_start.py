"""The container that is rendered for a worker, run as a process: what Ray and a run make of it and of its SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import ray
from elastic_cluster import LocalCluster
from elastic_cluster.kube.manifests.job import Group, KubeJob, Size
from elastic_cluster.kube.manifests.render import render
from harness import Run

from elastic.core.settings import ScalingSettings
from elastic.runtime.controller.senses.drain_monitor import draining_nodes

pytestmark = pytest.mark.ray

# Longer than a loaded machine takes to leave the pod.
DRAIN_S = 120


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """A head is enough; the pod is the other node."""
    yield from harness.module_cluster(1, cpus_per_node=1)


@pytest.mark.slow
def test_a_run_leaves_a_pod_that_is_told_to_end_without_repeating_a_step(cluster: LocalCluster, tmp_path: Path) -> None:
    group = _worker_group()
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=ScalingSettings(1, 2), epochs=20)
    with _pod(group, cluster, tmp_path / "log") as pod:
        node = harness.wait_until(lambda: _node_with(cluster, "fpga"), f"the pod to join: {tmp_path / 'log'}", 60.0)
        assert Path(f"/proc/{pod.pid}/cmdline").read_bytes().split(b"\0")[1].endswith(b"/ray"), (
            "Ray is its first process"
        )
        assert node["Resources"] | {"CPU": 1.0, "fpga": 3.0, "memory": 4.0 * 2**30} == node["Resources"]
        assert node["Resources"]["object_store_memory"] == 768 * 2**20
        assert node["Labels"] | {"ray.io/market-type": "spot", "ray.io/availability-zone": "z1"} == node["Labels"]

        run.allow(6)
        run.start()
        run.walk_until(lambda: _nodes_of(run) == {cluster.node("node-0").node_id, node["NodeID"]}, "a worker on each")
        assert {event["lasting"] for event in run.events("WorkerReady")} == {2, -1}, "the controller's node, and spot"
        told = time.time()
        pod.send_signal(signal.SIGTERM)
        deadline = harness.wait_until(
            lambda: draining_nodes().get(node["NodeID"]), "Ray to know that the node is going"
        )
        assert DRAIN_S - 1 <= deadline - told <= DRAIN_S + harness.LIMIT_S, "the run is told how long the pod will last"
        run.walk_until(lambda: node["NodeID"] not in _nodes_of(run), "the run to leave the pod")
        pod.wait(harness.LIMIT_S)
        assert time.time() < deadline, "when nothing runs on it any more it goes before its time"
    run.finish()

    run.assert_whole()
    shrunk = [incident for incident in run.incidents() if incident["next_world_size"] < incident["world_size"]]
    assert [(i["world_size"], i["next_world_size"], i["planned"], i["steps_repeated"]) for i in shrunk] == [
        (2, 1, True, 0)
    ]
    assert not run.events("SlotLost")


def _nodes_of(run: Run) -> set[str]:
    return {worker["node"] for worker in run.handle.progress()["workers"]}


def _worker_group() -> dict[str, Any]:
    # Room for one worker: which of two nodes gets the second one is a toss of Ray's.
    size = Size("1", "4Gi", "1Gi")
    group = Group("spot", size, 1, drain_s=DRAIN_S, capacity="spot", zone="z1", resources={"fpga": 3})
    job = KubeJob("gpt", "gpt", "image", ray.__version__, ("true",), (group,))
    found: dict[str, Any] = render(job)[-1]["spec"]["rayClusterSpec"]["workerGroupSpecs"][1]
    return found


def _start_command(group: dict[str, Any], address: str) -> str:
    """As KubeRay generates it of a group; and for this machine, what keeps two nodes out of each other's way."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    params = {
        **group["rayStartParams"],
        "address": address,
        "labels": ",".join(f"{key}={value}" for key, value in sorted(group["labels"].items())),
        "memory": str(int(limits["memory"].removesuffix("Gi")) * 2**30),
        "num-cpus": limits["cpu"],
        "resources": "'" + '{"fpga":3}' + "'",
    }
    here = {"min-worker-port": "0", "max-worker-port": "0"}
    flags = " ".join(f" --{key}={value} " for key, value in sorted({**params, **here}.items()))
    return f"ray start {flags} --block "


@contextlib.contextmanager
def _pod(group: dict[str, Any], cluster: LocalCluster, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    container = group["template"]["spec"]["containers"][0]
    env = {item["name"]: item.get("value", "") for item in container["env"]}
    env["KUBERAY_GEN_RAY_START_CMD"] = _start_command(group, cluster.address)
    with log.open("wb") as out:
        pod = subprocess.Popen(
            [*container["command"], *container["args"]],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield pod
    finally:
        # Its own session: whatever of it is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()


def _node_with(cluster: LocalCluster, resource: str) -> dict[str, Any] | None:
    listed: list[dict[str, Any]] = ray.nodes()
    return next((node for node in listed if node["Alive"] and resource in node["Resources"]), None)

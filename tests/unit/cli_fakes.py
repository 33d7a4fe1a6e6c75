"""A local cluster and a backend that tests of the command line share, and checkpoints that look like saved ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_cluster.source import NodeInfo, NodeState
from elastic_jobs import cli
from elastic_jobs.running.backend import Growth, NodeShape
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.run_plan import Job

from elastic.core.errors import NobodyAnswers, RunNotFound
from elastic.observe.journal import JournalWriter

JOB = """
entry_point: cli_train.py:main
min_workers: 2
max_workers: 4
max_steps: 10
resources_per_worker: {CPU: 2, GPU: 1, TPU: 3}
"""


class FakeCluster:
    address = "127.0.0.1:1"
    socket_path = Path("/nowhere/keeper.sock")

    def __init__(self) -> None:
        self.log: list[str] = []

    def nodes(self) -> tuple[NodeInfo, ...]:
        return tuple(NodeInfo(f"node-{i}", NodeState.ALIVE, head=i == 0, node_id=f"{i:02x}") for i in range(3))

    def _done(self, what: str, name: str | None) -> NodeInfo:
        self.log.append(f"{what} {name}")
        return self.nodes()[1]

    def kill_node(self, name: str) -> NodeInfo:
        return self._done("kill-node", name)

    def add_node(self, name: str | None = None) -> NodeInfo:
        return self._done("add-node", name)

    def freeze_node(self, name: str) -> NodeInfo:
        return self._done("freeze-node", name)

    def thaw_node(self, name: str) -> NodeInfo:
        return self._done("thaw-node", name)

    def drain_node(self, name: str) -> NodeInfo:
        return self._done("drain-node", name)

    def kill_worker(self, pid: int) -> NodeInfo:
        return self._done("kill-worker", str(pid))

    def kill_control_store(self) -> NodeInfo:
        return self._done("kill-control-store", None)

    def restart_control_store(self) -> NodeInfo:
        return self._done("restart-control-store", None)

    def detach(self) -> None:
        self.log.append("detach")

    def shutdown(self) -> None:
        self.log.append("shutdown")


class FakeBackend:
    """`script` plays the run: it gets the handle as soon as the run has started."""

    def __init__(self, status: str = "finished", **more: Any) -> None:
        self.cluster = FakeCluster()
        self.handle = FakeHandle()
        self.status, self.more = status, more
        self.calls: list[Any] = []
        self.reachable = True

    def start_cluster(self, nodes: int, shape: NodeShape, python_path: str, durable: bool = False) -> FakeCluster:
        self.calls.append(("cluster", nodes, shape))
        return self.cluster

    def start_autoscaled(self, growth: Growth, shape: NodeShape, python_path: str) -> FakeCluster:
        self.calls.append(("autoscaled", growth, shape))
        return self.cluster

    def attach_cluster(self, socket_path: str) -> FakeCluster:
        return self.cluster

    def start_run(self, job: Job, address: str) -> FakeHandle:
        settings = job.settings
        self.calls.append(("run", settings, job.entry_point, dict(job.config), address))
        writer = JournalWriter(settings.storage_url, settings.run_id)
        writer.append({"type": "run", "run_id": settings.run_id, "status": "running"})
        self.play(writer)
        return self.handle

    def play(self, writer: JournalWriter) -> None:
        writer.append({"type": "run", "status": self.status, "step": 10, "loss": 1.5})
        self.handle.advance(step=10, loss=1.5)
        self.handle.end(self.status, "because", **self.more)

    def attach_run(self, run_id: str, address: str) -> FakeHandle:
        if not self.reachable:
            raise RunNotFound(f"no controller of {run_id} at {address}")
        return self.handle

    def disconnect(self) -> None:
        self.cluster.log.append("disconnect")


class InterruptedHandle(FakeHandle):
    """Ctrl-C while it is followed."""

    def progress(self) -> Mapping[str, Any]:
        raise KeyboardInterrupt


def put_checkpoint(storage: str, step: int) -> None:
    folder = Path(storage, "r1", "checkpoints", f"step-{step:08d}-g0001")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def saved(storage: str, step: int, *, job: str = "job.yaml") -> None:
    assert cli.main(["run", job, "--run-id", "r1"], FakeBackend("stopped")) == 103
    JournalWriter(storage, "r1").append({"type": "checkpoint", "id": f"step-{step:08d}-g0001", "step": step})
    put_checkpoint(storage, step)


def refuse(run_id: str, address: str) -> FakeHandle:
    raise NobodyAnswers("nobody answers")


class Display:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, progress: Mapping[str, Any]) -> None: ...

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def close(self) -> None: ...

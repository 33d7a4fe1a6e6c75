"""Runs of this project on a local cluster of real raylets, struck from outside and read from marks and journal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from elastic_cluster.source import NodeInfo, NodeState
from elastic_jobs.running.backend import NodeShape
from elastic_jobs.running.handle import RunHandle
from elastic_jobs.running.ray_backend import RayBackend
from elastic_jobs.running.run_plan import Job

from benchmarks.children import ROOT, NotMeasured, until
from benchmarks.marks import Change, completed, read_marks, recovered
from elastic.core.errors import RunNotFound
from elastic.core.settings import CheckpointSettings, FailureSettings, RunSettings, ScalingSettings, SnapshotSettings
from elastic.observe.journal import JournalReader

_START_LIMIT_S, _STEP_LIMIT_S, _END_LIMIT_S = 180.0, 120.0, 60.0

Record = Mapping[str, Any]


class Cluster:
    """A local cluster of nodes with room for one worker each, and this process connected to it."""

    def __init__(self, nodes: int) -> None:
        self._backend = RayBackend()
        # Its own class and not the protocol's: workers are found by node.
        self.local: Any = self._backend.start_cluster(nodes, NodeShape(1.0, 0.0, {}), str(ROOT))

    def start_run(self, settings: RunSettings, config: Mapping[str, Any]) -> RunHandle:
        return self._backend.start_run(
            Job(settings, "benchmarks.workload:train", config, str(ROOT)), self.local.address
        )

    def nodes(self) -> tuple[NodeInfo, ...]:
        found: tuple[NodeInfo, ...] = self.local.nodes()
        return found

    def heal(self) -> None:
        """Every node alive; a frozen one begins a new life, as a machine that is rebooted does."""
        for node in self.nodes():
            if node.state is NodeState.FROZEN:
                self.local.kill_node(node.name)
            if node.state in (NodeState.FROZEN, NodeState.LOST):
                self.local.add_node(node.name)

    def close(self) -> None:
        self._backend.disconnect()
        self.local.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def settings(
    run_id: str,
    folder: Path,
    *,
    workers: tuple[int, int],
    snapshots: SnapshotSettings,
    save_every: int | None,
    spares: int = 0,
    max_steps: int = 1_000_000,
    **more: Any,
) -> RunSettings:
    """Defaults wherever the benchmark has nothing to say. `workers` is (min, max); `more`: other settings of a run."""
    return RunSettings(
        run_id=run_id,
        scaling=replace(ScalingSettings(*workers), spare_slots=spares),
        max_steps=max_steps,
        checkpoint=CheckpointSettings(str(folder), save_every),
        snapshots=snapshots,
        failures=FailureSettings(),
        storage_url=str(folder),
        **more,
    )


class OwnRun:
    """One run, started at once. `with` ends it, however the case ends."""

    def __init__(self, cluster: Cluster, made: RunSettings, size: str, stage: int, **config: Any) -> None:
        """`config` is given to the training function next to the size, the stage and the folder of the marks."""
        self.cluster, self.settings = cluster, made
        self.marks = Path(made.storage_url) / f"{made.run_id}-marks"
        self.marks.mkdir(parents=True)
        self.handle = cluster.start_run(made, {"size": size, "stage": stage, "marks": str(self.marks), **config})

    # -- waiting --

    def until(self, condition: Any, awaited: str, limit_s: float) -> Any:
        """Given up at once where the run has ended."""

        def look() -> Any:
            if value := condition():
                return value
            if (result := self.handle.result(0.0)) is not None:
                raise NotMeasured(f"run {self.settings.run_id} ended before {awaited}: {result}")
            return None

        return until(look, f"{awaited}; the run says: {self.handle.progress().get('doing')}", limit_s)

    def wait_steps(self, count: int, world_size: int, limit_s: float = _START_LIMIT_S) -> None:
        """Until `count` more steps are done at `world_size`, in one era."""
        since = time.time()

        def enough() -> bool:
            done = [step for step in completed(read_marks(self.marks)) if step.at > since]
            return sum(step.world_size == world_size and step.era == done[-1].era for step in done) >= count

        self.until(enough, f"{count} steps of {world_size} workers", limit_s)

    def step_s(self) -> float:
        """The median time between two of the newest steps of one era."""
        done = completed(read_marks(self.marks))
        ends = [step.at for step in done if step.era == done[-1].era][-20:]
        return median(after - before for before, after in pairwise(ends))

    def wait_checkpoint(self) -> None:
        """Until there is one to go back to: a save that is still on its way is none."""

        def committed() -> bool:
            return self.handle.progress().get("last_checkpoint_step") is not None

        self.until(committed, "a committed checkpoint", _START_LIMIT_S)

    # -- faults; each returns when it began --

    def kill_node(self, which: int = -1) -> tuple[float, str]:
        """`which` of the nodes that may be lost, in the cluster's order."""
        node = self._victim(which)
        at = time.time()
        self.cluster.local.kill_node(node.name)
        return at, node.name

    def freeze_node(self) -> tuple[float, str]:
        node = self._victim()
        at = time.time()
        self.cluster.local.freeze_node(node.name)
        return at, node.name

    def kill_worker(self) -> tuple[float, str]:
        node = self._victim()
        pid = next(worker["pid"] for worker in self._workers() if worker["node"] == node.node_id)
        at = time.time()
        self.cluster.local.kill_worker(pid)
        return at, node.name

    def _workers(self) -> list[Record]:
        return [worker for worker in self.handle.progress()["workers"] if worker["rank"] is not None]

    def _victim(self, which: int = -1) -> NodeInfo:
        """A node that carries a rank and is not the head, which the cluster cannot do without; the last one."""
        carrying = {worker["node"] for worker in self._workers()}
        found = [node for node in self.cluster.nodes() if node.node_id in carrying and not node.head]
        if not found:
            raise NotMeasured("no node but the head carries a worker")
        return found[which]

    # -- what came of it --

    def recovery(self, fault_at: float) -> tuple[Change, Record]:
        """The steps as the workers saw them, and the run's own record of the incident."""

        def back() -> Change | None:
            return recovered(read_marks(self.marks), fault_at)

        change = self.until(back, "a step after the fault", _STEP_LIMIT_S)

        def written() -> Record | None:
            return next((i for i in self.incidents() if not i["planned"] and ended(i) > fault_at), None)

        return change, self.until(written, "the record of the incident", _STEP_LIMIT_S)

    def records(self) -> list[Record]:
        try:
            return list(JournalReader(self.settings.storage_url, self.settings.run_id).records())
        except RunNotFound:
            return []

    def incidents(self) -> list[Record]:
        """In order, each as it was written last."""
        found = {record["id"]: record for record in self.records() if record["type"] == "incident"}
        return list(found.values())

    def stop(self) -> None:
        """A planned end. Raises NotMeasured where it does not come."""
        if self.handle.result(0.0) is None:
            self.handle.stop("measured")
        until(lambda: self.handle.result(1.0), f"run {self.settings.run_id} to end", _END_LIMIT_S)
        leave = getattr(self.handle, "leave", None)
        if leave is not None:
            leave()

    def __enter__(self) -> OwnRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def ended(incident: Record) -> float:
    """When its first step was done, 0 where there was none."""
    return float(incident["times"].get("first_step", 0.0))


# Marks of the incident under the names that the documents use; the others keep theirs.
_NAMES = {"group_ready": "rebuilt", "state_ready": "verified", "proven": "verified"}


def timeline(incident: Record, records: Sequence[Record], start: float) -> dict[str, float]:
    """Seconds from `start` to each mark of the incident, in their order.

    *aborted* is when the last member left its generation, *restored* when the verification of the state began. Some
    versions do not have them among the incident's own times; they are then taken from other records.
    """
    times = {_NAMES.get(name, name): float(at) for name, at in incident["times"].items()}
    left = [r["now"] for r in records if r["type"] == "event" and r["event"] == "WorkerLeft"
            and r["generation"] == incident["generation"]]  # fmt: skip
    verifying_s = (incident.get("restore") or {}).get("verify_s")
    derived = {
        **({"aborted": max(left)} if left else {}),
        **({"restored": times["verified"] - verifying_s} if verifying_s is not None and "verified" in times else {}),
    }
    return {name: round(at - start, 3) for name, at in sorted({**derived, **times}.items(), key=lambda item: item[1])}

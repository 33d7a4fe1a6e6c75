"""The worker's side of one generation: the `Coordinator` of the training thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.checkpoint.storage import CheckpointStore
from elastic.checkpoint.writer import BackgroundWriter
from elastic.core import events as ev
from elastic.core.checkpoint.rounds import Rounds
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.data.steps import StepReport
from elastic.core.errors import GenerationEnded
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import FailureSettings
from elastic.runtime.messages import Item
from elastic.runtime.storage_retry import RetryingSource
from elastic.runtime.worker.outbox import Outbox
from elastic.training.session import Phase, RestoreReport, SnapshotMemory, Stop
from elastic.transport.handshake import Address

# Many times the number of reports that can be in transit to the controller.
_RECENT_STEPS = 64


class RayCoordinator:
    """Implements `elastic.training.session.Coordinator`.

    The controller calls `propose_stop` and `commit_stop` on other threads; `boundary` on the training thread waits for
    them.
    """

    keeps_nothing = False

    def __init__(
        self,
        spec: GenerationSpec,
        worker: int,
        outbox: Outbox,
        source: CheckpointStore,
        writer: BackgroundWriter,
        failures: FailureSettings,
        memory: SnapshotMemory | None = None,
        snapshot: Callable[[str, float, Callable[[float], None], Callable[[int], None]], CheckpointSource]
        | None = None,
        server: tuple[Address, bytes] | None = None,
    ) -> None:
        """`snapshot(id, limit_s, check, moved)` gives the source of a snapshot in the nodes' memory; `check` is
        `_pause`, `moved` is `_restoring`."""
        self._spec = spec
        self._worker = worker
        self._outbox = outbox
        self._source = source
        self._writer = writer
        self._commit_timeout_s = failures.drain_timeout_s
        self._retry_s = failures.storage_backoff_s
        # `join_timeout_s` limits how long a generation's start makes no progress.
        self._restore_limit_s = failures.join_timeout_s / 2
        self._restored_bytes = 0
        self._restore_told = time.monotonic()
        self._change = threading.Condition()
        self._promised: int | None = 0 if spec.stops_at_start else None
        self._stop_at: int | None = None
        self._stop = Stop.DURABLE
        self._memory = memory
        self._snapshot = snapshot
        self._server = server
        self._memory_works = spec.memory is not None and memory is not None
        self._ended: str | None = None
        self._step: int | None = None
        self._origin = ""
        self._reached = False
        self._first_report = True
        self._recent: deque[StepReport] = deque(maxlen=_RECENT_STEPS)

    # --- Coordinator, on the training thread ---

    def source(self) -> CheckpointSource:
        wanted = self._spec.checkpoint
        if wanted is not None and is_snapshot(wanted) and self._snapshot is not None:
            # Not retried: a node that does not answer may be gone, and another one then holds its data.
            return self._snapshot(wanted, self._restore_limit_s, self._pause, self._restoring)
        return RetryingSource(self._source, self._retry_s, self._restore_limit_s, self._pause, self._restoring)

    def folder(self) -> str | None:
        return self._source.folder

    def phase(self, phase: Phase) -> None:
        if phase is Phase.BUILDING:
            self._post(ev.GroupJoined(self._spec.generation, self._worker))

    def restored(self, report: RestoreReport) -> None:
        self._origin = report.source
        self._outbox.put(Item("restored", {**asdict(report), "worker": self._worker, **self._place()}))

    def memory(self) -> SnapshotMemory | None:
        return self._memory

    def shard_server(self) -> tuple[Address, bytes] | None:
        return self._server

    def recent_steps(self) -> list[dict[str, Any]]:
        # A copy: the training thread may append concurrently.
        return [report.to_json() for report in tuple(self._recent)]

    def cadence(self, step: int, every_steps: int, cost_s: float, step_s: float) -> None:
        told = {"step": step, "every_steps": every_steps, "cost_s": cost_s, "step_s": step_s}
        self._outbox.put(Item("cadence", {**told, **self._place()}))

    def moved(self, over: bool = False) -> None:
        self._outbox.put(Item("moved", {"over": over, **self._place()}, urgent=over, replay=over))

    def passes(self, described: Sequence[Any]) -> None:
        self._outbox.put(Item("passes", {"passes": list(described), **self._place()}, urgent=False, replay=True))

    def recorded(self, recording: bytes) -> None:
        self._outbox.put(Item("recorded", {"recording": recording, **self._place()}, replay=True))

    def memory_lost(self, reason: str) -> None:
        self._memory_works = False
        self._post(ev.MemoryLost(self._spec.generation, self._worker, reason))

    def replica_moved(self, sentence: str) -> None:
        self._outbox.put(Item("replica_moved", {"sentence": sentence, "step": self._step, **self._place()}))

    def memory_used(self, told: Mapping[str, Any]) -> None:
        self._outbox.put(Item("memory", {**told, **self._place()}, urgent=False, replay=True))

    def boundary(self, step: int) -> Stop | None:
        with self._change:
            self._step = step
            if not self._reached:
                self._reached = True
                self._post(ev.TrainingReached(self._spec.generation, self._worker, step, self._origin))
            self._check()
            if self._promised is not None and step >= self._promised and self._stop_at is None:
                self._await_commit()
            return self._stop if self._stop_at is not None and step >= self._stop_at else None

    def step_done(self, report: StepReport) -> None:
        report = replace(report, generation=self._spec.generation, rank=self._spec.rank)
        self._recent.append(report)
        # The first step ends a recovery and is sent at once; later reports may wait to be sent together.
        self._outbox.put(Item("step", report, urgent=self._first_report, replay=True))
        self._first_report = False

    def can_save(self) -> bool:
        return self._writer.free

    def save_left_out(self, step: int) -> None:
        # All ranks agree, so one of them reports.
        if self._spec.rank == 0:
            self._outbox.put(Item("save_left_out", {"step": step, **self._place()}))

    def save(self, snapshot: ShardSnapshot) -> None:
        self._writer.submit(snapshot)

    # --- the controller, on other threads ---

    def propose_stop(self) -> tuple[int, bool]:
        """(a step that this rank promises not to pass: the end of the current one, or of the round in which islands
        train by themselves; whether node memory takes snapshots)."""
        with self._change:
            if self._promised is None:
                done = self._step if self._step is not None else 0
                self._promised = Rounds.of(self._spec.communication).next_whole(done + 1)
            works = self._memory_works and self._memory is not None and self._memory.failed() is None
            return self._promised, works

    def commit_stop(self, step: int, durable: bool, last: bool = False) -> None:
        with self._change:
            self._stop_at = step
            self._stop = Stop.LAST if last else Stop.DURABLE if durable else Stop.MEMORY
            self._change.notify_all()

    def end(self, reason: str) -> None:
        with self._change:
            self._ended = reason
            self._change.notify_all()

    # --- inside ---

    def _restoring(self, count: int) -> None:
        """So many more bytes of state were read. Reported only while that takes long."""
        self._restored_bytes += count
        now = time.monotonic()
        if now - self._restore_told > self._restore_limit_s / 4:
            self._restore_told = now
            self._post(ev.RestoreProgressed(self._spec.generation, self._worker, self._restored_bytes))

    def _await_commit(self) -> None:
        limit = time.monotonic() + self._commit_timeout_s
        while self._stop_at is None:
            self._check()
            if not self._change.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                raise GenerationEnded(self._spec.generation, "the controller did not commit a step to stop at")

    def _pause(self, seconds: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self._ended is not None, seconds)
            self._check()

    def _check(self) -> None:
        if self._ended is not None:
            raise GenerationEnded(self._spec.generation, self._ended)

    def _post(self, event: ev.Event) -> None:
        self._outbox.put(Item("event", ev.to_json(event)))

    def _place(self) -> dict[str, int]:
        return {"generation": self._spec.generation, "rank": self._spec.rank, "world_size": self._spec.world_size}

"""Sense: when each node and each worker was last heard of, and when a step last ended. Silence and standstill become
events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from elastic.core.events import Event, WorkerDied
from elastic.core.fleet import Slots
from elastic.core.policy.liveness import LastSeen
from elastic.core.run.phase import Ending, Finished, Training
from elastic.core.run.state import RunState
from elastic.core.settings import FailureSettings
from elastic.runtime.controller.telemetry import Telemetry
from elastic.runtime.messages import BEAT_LIMIT_S, Beat, QuietNodes

logger = logging.getLogger(__name__)


class HeartbeatTable:
    """`state` gives the run's state at present; `emit` gets WorkerDied, WorkersSilent and ProgressStalled."""

    def __init__(
        self,
        failures: FailureSettings,
        state: Callable[[], RunState],
        telemetry: Telemetry,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._failures = failures
        self._state = state
        self._telemetry = telemetry
        self._emit = emit
        self._clock = clock
        # Of this table, nodes that are part of it: most beats come while it does not change.
        self._checked: tuple[Slots, set[str]] = Slots(), set()
        self._seen = LastSeen(failures.heartbeat_s, failures.controller_lease_s)

    def beat(self, beat: Beat, now: float) -> bool:
        """A node's heartbeat. False when the node is not part of the run, or the run is over."""
        if isinstance(self._state().phase, Finished) or not self._is_part(beat.node):
            return False
        self._seen.heard_node(beat.node, now, beat.ages)
        for worker, evidence in beat.gone.items():
            self._emit(WorkerDied(worker, evidence))
        return True

    def quiet(self, beats: QuietNodes, now: float) -> tuple[str, ...]:
        """As `beat` of several nodes, none of whose workers is silent. Returns those that are not part of the run."""
        if isinstance(self._state().phase, Finished):
            return beats.nodes
        released = tuple([node for node in beats.nodes if not self._is_part(node)])
        if released:
            kept = [pair for pair in zip(*beats, strict=True) if pair[0] not in released]
            beats = QuietNodes(tuple(node for node, _ in kept), tuple(workers for _, workers in kept))
        self._seen.heard_quiet(*beats, now)
        return released

    def worker_spoke(self, worker: int, now: float) -> None:
        """A message of the worker itself has arrived."""
        node = self._state().fleet.node_of(worker)
        if node is not None:
            self._seen.heard_worker(worker, node, now)

    def agents_spoke(self, nodes: Iterable[str], now: float) -> None:
        """A message of these nodes' agents other than a heartbeat has arrived."""
        for node in filter(self._is_part, nodes):
            self._seen.heard_node(node, now)

    def expect(self, worker: int, node: str, now: float) -> None:
        """A restarted controller: the node's agent may still be waiting for the answer of the previous one."""
        self._seen.expect(worker, node, now + BEAT_LIMIT_S)

    def retain(self, workers: Collection[int], nodes: Collection[str]) -> None:
        """Forget all other workers and nodes."""
        self._seen.retain(workers, nodes)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._failures.heartbeat_s / 2)
            try:
                self.look(self._clock())
            except Exception:
                # An exception must not end the watch: the run would continue unwatched.
                logger.exception("the check for silence and standstill failed")

    def look(self, now: float) -> None:
        """Emit what has been silent or has not moved for too long."""
        failures, state, telemetry = self._failures, self._state(), self._telemetry
        ending = isinstance(state.phase, Ending)
        limit_s = failures.suspect_after_s
        # Where a relay is lost, its nodes' beats come half of this time later.
        if ending and not 0 < failures.nodes_per_relay < len(state.fleet.slots):
            limit_s = failures.probe_timeout_s + failures.heartbeat_s
        # At the end of a generation nobody is probed, and a worker that speaks is there.
        silence = self._seen.silent(now, limit_s, agents=not ending)
        if silence is not None:
            self._emit(silence)
            if not all(worker in state.fleet.workers for worker in silence.workers):
                # A late beat has named a worker that had left the run before it was ever heard of.
                self.retain(state.fleet.workers.keys(), state.fleet.nodes)
        # With no heartbeats at all, missing step reports mean nothing.
        training = isinstance(state.phase, Training) and not self._seen.alone(now, failures.suspect_after_s)
        stalled = telemetry.watch.check(state.generation, telemetry.step, now, training)
        if stalled is not None:
            self._emit(stalled)
        telemetry.flush(now)

    def _is_part(self, node: str) -> bool:
        slots = self._state().fleet.slots
        if slots is not self._checked[0]:
            self._checked = slots, set()
        if node not in self._checked[1] and slots.on(node):
            self._checked[1].add(node)
        return node in self._checked[1]

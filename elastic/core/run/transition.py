"""One transition of the state machine while it is being worked out: the next state and the actions so far.

Mutable on purpose and never seen outside `elastic.core`: the functions that make up a transition read well as
statements, while `machine.step` stays a pure function from one frozen state to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from elastic.core.actions import Action, KillWorker, Note, ReleaseSlot, RequestSlot, StartWorker
from elastic.core.policy.quarantine import avoided, struck
from elastic.core.run.incident import Incident
from elastic.core.run.state import RunPhase, RunState, Slot, SlotPhase, Worker, WorkerPhase

_FIELDS = frozenset(field.name for field in fields(RunState))


class Transition:
    def __init__(self, state: RunState, now: float, tick: bool = False) -> None:
        self.state = state
        self.now = now
        self._tick = tick
        self.actions: list[Action] = []

    # --- writing ---

    def set(self, **changes: Any) -> None:
        """The next state. Does what `dataclasses.replace` does without passing two dozen fields through __init__, which
        took most of a transition's time."""
        assert changes.keys() <= _FIELDS, f"RunState has no field {changes.keys() - _FIELDS}"
        state = object.__new__(RunState)
        vars(state).update(vars(self.state), **changes)
        self.state = state

    def enter(self, phase: RunPhase) -> None:
        self.set(phase=phase)

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def say(self, sentence: str, kind: str = "decision", **data: Any) -> None:
        self.do(Note(sentence, kind, data))

    def mark(self, *names: str) -> None:
        """Set these times of the open incident, where they are not set yet."""
        incident = self.state.incident
        for name in names:
            incident = incident.at(name, self.now) if incident else None
        self.set(incident=incident)

    def amend(self, **changes: Any) -> Incident | None:
        """Change fields of the open incident, if there is one."""
        if self.state.incident is not None:
            self.set(incident=replace(self.state.incident, **changes))
        return self.state.incident

    # --- slots and workers ---

    def request_slot(self) -> None:
        avoid = avoided(self.state.quarantine, self.now)
        slot = Slot(self.state.next_slot, SlotPhase.PENDING, self.now, avoid=avoid)
        self.set(next_slot=slot.id + 1, slots={**self.state.slots, slot.id: slot})
        self.do(RequestSlot(slot.id, self.state.settings.scaling.workers_per_slot, avoid))

    def strike(self, node: str, why: str, *, certain: bool) -> None:
        """Something is held against the node; it may be left alone for a while (core.quarantine)."""
        limits = self.state.settings.failures
        table = struck(
            self.state.quarantine, node, self.now, limits.quarantine_s, limits.quarantine_limit_s, certain=certain
        )
        self.set(quarantine=table)
        if table[node].until:
            pause_s = table[node].until - self.now
            self.say(f"node {node[:8]} is left alone for {pause_s:.0f} s: {why}", kind="quarantine")

    def drop_slot(self, slot: int, cause: str) -> None:
        """Forget the slot and its workers and have it released."""
        if slot not in self.state.slots:
            return
        for worker in self.workers_in(slot):
            self.forget_worker(worker.id)
        self.set(
            slots={key: value for key, value in self.state.slots.items() if key != slot},
            evicted=tuple(other for other in self.state.evicted if other != slot),
            ceded=tuple(other for other in self.state.ceded if other != slot),
        )
        self.do(ReleaseSlot(slot, cause))

    def start_worker(self, slot: int) -> None:
        worker = Worker(self.state.next_worker, slot, WorkerPhase.STARTING, self.now)
        self.set(next_worker=worker.id + 1)
        self.put_worker(worker)
        self.do(StartWorker(worker.id, slot))

    def put_worker(self, worker: Worker) -> None:
        self.set(workers={**self.state.workers, worker.id: worker})

    def put_slot(self, slot: Slot) -> None:
        self.set(slots={**self.state.slots, slot.id: slot})

    def forget_worker(self, worker: int) -> None:
        self.set(workers={key: value for key, value in self.state.workers.items() if key != worker})

    def replace_worker(self, worker: int, cause: str) -> None:
        """End the worker's process and start a fresh one in its slot."""
        known = self.state.workers.get(worker)
        self.kill_worker(worker, cause)
        if known is not None and known.slot in self.state.slots:
            self.start_worker(known.slot)

    def kill_worker(self, worker: int, cause: str) -> None:
        """End the worker's process and forget it."""
        if worker in self.state.workers:
            self.do(KillWorker(worker, cause))
            self.forget_worker(worker)

    def set_phase(self, workers: Iterable[int], phase: WorkerPhase) -> None:
        changed = {w: replace(self.state.workers[w], phase=phase) for w in workers if w in self.state.workers}
        self.set(workers={**self.state.workers, **changed})

    # --- reading ---

    def passed(self, deadline: float) -> bool:
        """Deadlines are enforced by ticks only: after a pause of the controller, messages that wait are heard first."""
        return self._tick and self.now >= deadline

    def workers_in(self, slot: int) -> list[Worker]:
        return [worker for worker in self.state.workers.values() if worker.slot == slot]

    def idle_workers(self) -> list[Worker]:
        """Workers that could be members now, ordered so that one node's ranks are neighbours."""
        idle = self.state.idle
        return sorted(idle, key=lambda worker: (worker.slot, worker.id))

    def name_of(self, worker: int) -> str:
        rank, node = self.state.rank_of(worker), self.state.node_of(worker)
        who = f"rank {rank}" if rank is not None else f"worker {worker}"
        return f"{who} on node {node[:8]}" if node else who

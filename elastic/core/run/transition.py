"""One transition of the state machine while it is being worked out: the next state and the actions so far.

Mutable on purpose and never seen outside `elastic.core`: the functions that make up a transition read well as
statements, while `machine.step` stays a pure function from one frozen state to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from elastic.core.actions import Action, KillWorker, Note, ReleaseSlot, RequestSlot, StartWorker
from elastic.core.incident import Incident
from elastic.core.policy.quarantine import avoided, struck
from elastic.core.run.phase import RunPhase
from elastic.core.run.state import Fleet, RunState, Saved, Slot, SlotPhase, Trouble, Worker, WorkerPhase

_Record = TypeVar("_Record", RunState, Fleet, Saved, Trouble, Worker)


def _changed(record: _Record, changes: Mapping[str, Any]) -> _Record:
    """As `dataclasses.replace`, which looks at every field's definition each time, and sets a frozen record's fields
    one by one: ten times as long, which is seconds where 80,000 workers leave a generation."""
    made = object.__new__(type(record))
    vars(made).update(vars(record), **changes)
    return made


class Transition:
    def __init__(self, state: RunState, now: float, tick: bool = False) -> None:
        self.state = state
        self.now = now
        self._tick = tick
        self.actions: list[Action] = []

    # --- writing ---

    def set(self, **changes: Any) -> None:
        """Change fields of the state that are in none of its records."""
        self.state = _changed(self.state, changes)

    def set_fleet(self, **changes: Any) -> None:
        self.state = _changed(self.state, {"fleet": _changed(self.state.fleet, changes)})

    def set_saved(self, **changes: Any) -> None:
        self.state = _changed(self.state, {"saved": _changed(self.state.saved, changes)})

    def set_trouble(self, **changes: Any) -> None:
        self.state = _changed(self.state, {"trouble": _changed(self.state.trouble, changes)})

    def enter(self, phase: RunPhase) -> None:
        self.set(phase=phase)

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def say(self, sentence: str, kind: str = "decision", **data: Any) -> None:
        self.do(Note(sentence, kind, data))

    def mark(self, *names: str) -> None:
        """Set these times of the open incident, where they are not set yet."""
        incident = self.trouble.incident
        for name in names:
            incident = incident.at(name, self.now) if incident else None
        self.set_trouble(incident=incident)

    def amend(self, **changes: Any) -> Incident | None:
        """Change fields of the open incident, if there is one."""
        if self.trouble.incident is not None:
            self.set_trouble(incident=replace(self.trouble.incident, **changes))
        return self.trouble.incident

    # --- slots and workers ---

    def request_slot(self) -> None:
        avoid = avoided(self.fleet.quarantine, self.now)
        slot = Slot(self.fleet.next_slot, SlotPhase.PENDING, self.now, avoid=avoid)
        self.set_fleet(next_slot=slot.id + 1, slots=self.fleet.slots.put({slot.id: slot}))
        self.do(RequestSlot(slot.id, self.state.settings.scaling.workers_per_slot, avoid))

    def strike(self, node: str, why: str, *, certain: bool) -> None:
        """Record a strike against the node, which may quarantine it (core.policy.quarantine)."""
        limits = self.state.settings.failures
        table = struck(
            self.fleet.quarantine, node, self.now, limits.quarantine_s, limits.quarantine_limit_s, certain=certain
        )
        self.set_fleet(quarantine=table)
        if table[node].until:
            pause_s = table[node].until - self.now
            self.say(f"node {node[:8]} is quarantined for {pause_s:.0f} s: {why}", kind="quarantine")

    def drop_slot(self, slot: int, cause: str) -> None:
        """Forget the slot and its workers and have it released."""
        if slot not in self.fleet.slots:
            return
        for worker in self.workers_in(slot):
            self.forget_worker(worker.id)
        self.set_fleet(
            slots=self.fleet.slots.without((slot,)),
            evicted=tuple(other for other in self.fleet.evicted if other != slot),
            ceded=tuple(other for other in self.fleet.ceded if other != slot),
        )
        self.do(ReleaseSlot(slot, cause))

    def start_workers(self, slot: int, count: int) -> None:
        if count < 1:
            return
        first = self.fleet.next_worker
        new = {n: Worker(n, slot, WorkerPhase.STARTING, self.now) for n in range(first, first + count)}
        self.set_fleet(next_worker=first + count, workers=self.fleet.workers.put(new))
        self.actions += [StartWorker(number, slot) for number in new]

    def put_worker(self, worker: Worker) -> None:
        self.set_fleet(workers=self.fleet.workers.put({worker.id: worker}))

    def put_slot(self, slot: Slot) -> None:
        self.set_fleet(slots=self.fleet.slots.put({slot.id: slot}))

    def forget_worker(self, worker: int) -> None:
        self.set_fleet(workers=self.fleet.workers.without((worker,)), inside=self.fleet.inside.minus((worker,)))

    def replace_worker(self, worker: int, cause: str) -> None:
        """End the worker's process and start a fresh one in its slot."""
        known = self.fleet.workers.get(worker)
        self.kill_worker(worker, cause)
        if known is not None and known.slot in self.fleet.slots:
            self.start_workers(known.slot, 1)

    def kill_worker(self, worker: int, cause: str) -> None:
        """End the worker's process and forget it."""
        if worker in self.fleet.workers:
            self.do(KillWorker(worker, cause))
            self.forget_worker(worker)

    def enter_generation(self, workers: Iterable[int]) -> None:
        self.set_fleet(inside=self.fleet.inside.plus(workers))

    def leave_generation(self, workers: Iterable[int]) -> None:
        self.set_fleet(inside=self.fleet.inside.minus(workers))

    # --- reading ---

    @property
    def fleet(self) -> Fleet:
        return self.state.fleet

    @property
    def saved(self) -> Saved:
        return self.state.saved

    @property
    def trouble(self) -> Trouble:
        return self.state.trouble

    @property
    def is_tick(self) -> bool:
        """The event is a Tick: deadlines may pass."""
        return self._tick

    def passed(self, deadline: float) -> bool:
        """Deadlines are enforced by ticks only: after a pause of the controller, messages that wait are heard first."""
        return self._tick and self.now >= deadline

    def workers_in(self, slot: int) -> list[Worker]:
        return self.fleet.workers.in_slot(slot)

    def name_of(self, worker: int) -> str:
        rank, node = self.state.rank_of(worker), self.fleet.node_of(worker)
        who = f"rank {rank}" if rank is not None else f"worker {worker}"
        return f"{who} on node {node[:8]}" if node else who

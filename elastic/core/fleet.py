"""Slots, workers and members: one of each as a record, all of them as tables that answer what the rules ask of them.

The rules run after every event. Each table keeps the counts and the indexes that they read, so that a rule costs as
much as what it changes, however many nodes there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar

from elastic.core.tables import CHUNK_BITS, Numbers, Table, bucket_of


class SlotPhase(str, Enum):
    PENDING = "pending"
    PLACED = "placed"


class WorkerPhase(str, Enum):
    STARTING = "starting"
    IDLE = "idle"
    MEMBER = "member"


@dataclass(frozen=True)
class Slot:
    """One node's share of the run. A lost slot is removed from the state; its number is never used again."""

    id: int
    phase: SlotPhase
    since: float
    node: str | None = None
    start_failures: int = 0
    # Nodes that it was asked not to be placed on.
    avoid: tuple[str, ...] = ()
    # How often in a row its node's agent was silent while a worker answered the probe, and when it was so last.
    acquittals: int = 0
    acquitted_at: float = 0.0


@dataclass(frozen=True)
class Worker:
    """One worker process. A dead worker is removed; its successor in the same slot has a new number."""

    id: int
    slot: int
    phase: WorkerPhase
    since: float
    pid: int | None = None
    host: str = ""


class Slots(Table[Slot]):
    """`pending` are those without a node yet, `failing` those with failed starts."""

    __slots__ = ("_avoided", "_by_node", "failing", "pending")
    JSON_FORM = Mapping[int, Slot]
    pending: Numbers
    failing: Numbers
    _avoided: Counter[tuple[str, ...]]
    _by_node: Table[dict[str, tuple[int, ...]]]

    def on(self, node: str | None) -> tuple[int, ...]:
        """The slots on this node, in the order of their numbers."""
        return self._by_node.get(bucket_of(node), {}).get(node, ()) if node is not None else ()

    @property
    def shut(self) -> frozenset[str]:
        """The nodes that every pending slot avoids."""
        return frozenset.intersection(*map(frozenset, self._avoided)) if self._avoided else frozenset()

    def _index(self, before: Slots | None, put: Mapping[int, Slot], gone: Collection[int]) -> None:
        self.pending, self.failing = (before.pending, before.failing) if before is not None else (Numbers(), Numbers())
        self._avoided = Counter(before._avoided) if before else Counter[tuple[str, ...]]()
        self._by_node = before._by_node if before else Table()
        changed = (*put, *gone)
        old = [slot for number in changed if (slot := before.get(number))] if before else []
        pending = [number for number, slot in put.items() if slot.phase is SlotPhase.PENDING]
        self.pending = _updated(self.pending, changed, pending)
        self.failing = _updated(self.failing, changed, [n for n, slot in put.items() if slot.start_failures])
        self._avoided.subtract(slot.avoid for slot in old if slot.phase is SlotPhase.PENDING)
        self._avoided.update(put[number].avoid for number in pending)
        self._avoided = +self._avoided
        for slot in old:
            if slot.id not in put or put[slot.id].node != slot.node:
                self._move(slot.node, slot.id, away=True)
        for slot in put.values():
            if slot.id not in self.on(slot.node):
                self._move(slot.node, slot.id, away=False)

    def _move(self, node: str | None, slot: int, away: bool) -> None:
        if node is None:
            return
        there = (*(other for other in self.on(node) if other != slot), *(() if away else (slot,)))
        bucket = {**self._by_node.get(bucket_of(node), {}), node: tuple(sorted(there))}
        self._by_node = self._by_node.put({bucket_of(node): {name: slots for name, slots in bucket.items() if slots}})


class Workers(Table[Worker]):
    """`starting` are those that are not ready yet, in the order in which they were started."""

    __slots__ = ("_by_slot", "_idle", "_members", "starting")
    JSON_FORM = Mapping[int, Worker]
    starting: Numbers
    _idle: int
    _members: int
    _by_slot: Table[tuple[int, ...]]

    def count(self, phase: WorkerPhase) -> int:
        if phase is WorkerPhase.STARTING:
            return len(self.starting)
        return self._idle if phase is WorkerPhase.IDLE else self._members

    def in_slot(self, slot: int) -> list[Worker]:
        return [self[number] for number in self._by_slot.get(slot, ())]

    def in_phase(self, numbers: Iterable[int], phase: WorkerPhase) -> Workers:
        """With these of its workers in this phase, which is not the first one. As `put`, in one pass and half of the
        time: all members leave at once, and begin at once."""
        chunks, copied = dict(self._chunks), set()
        changed = idle = 0
        ready: list[int] = []
        for number in numbers:
            place = number >> CHUNK_BITS
            chunk = chunks.get(place)
            if chunk is None or number not in chunk:
                continue
            if place not in copied:
                copied.add(place)
                chunk = chunks[place] = dict(chunk)
            worker = chunk[number]
            changed += 1
            if worker.phase is WorkerPhase.IDLE:
                idle += 1
            elif worker.phase is WorkerPhase.STARTING:
                ready.append(number)
            chunk[number] = made = object.__new__(Worker)
            # Not by the constructor, which sets a frozen record's fields one by one.
            object.__setattr__(made, "__dict__", {**worker.__dict__, "phase": phase})
        to_idle = changed if phase is WorkerPhase.IDLE else 0
        next_one = object.__new__(Workers)
        next_one._chunks, next_one._size, next_one._by_slot = chunks, self._size, self._by_slot
        next_one.starting = self.starting.minus(ready) if ready else self.starting
        next_one._idle = self._idle - idle + to_idle
        next_one._members = self._members - (changed - idle - len(ready)) + changed - to_idle
        return next_one

    def _index(self, before: Workers | None, put: Mapping[int, Worker], gone: Collection[int]) -> None:
        self.starting = before.starting if before is not None else Numbers()
        idle, members = (before._idle, before._members) if before is not None else (0, 0)
        self._by_slot = before._by_slot if before is not None else Table()
        come: dict[int, list[int]] = {}
        starting, ready = [], list(gone)
        for number, worker in put.items():
            old = before.get(number) if before is not None else None
            phase = worker.phase
            was = old.phase if old is not None else None
            if was is not phase:
                idle += (phase is WorkerPhase.IDLE) - (was is WorkerPhase.IDLE)
                members += (phase is WorkerPhase.MEMBER) - (was is WorkerPhase.MEMBER)
            if old is None:
                come.setdefault(worker.slot, []).append(number)
            if phase is WorkerPhase.STARTING:
                starting.append(number)
            elif was is WorkerPhase.STARTING:
                ready.append(number)
        if come:
            self._by_slot = self._by_slot.put({s: (*self._by_slot.get(s, ()), *more) for s, more in come.items()})
        for number in gone:
            assert before is not None
            worker = before[number]
            idle -= worker.phase is WorkerPhase.IDLE
            members -= worker.phase is WorkerPhase.MEMBER
            rest = tuple(other for other in self._by_slot[worker.slot] if other != number)
            self._by_slot = self._by_slot.put({worker.slot: rest}) if rest else self._by_slot.without((worker.slot,))
        self._idle, self._members = idle, members
        if ready:
            self.starting = self.starting.minus(ready)
        if starting:
            self.starting = self.starting.plus(starting)


class Members(tuple[int, ...]):
    """The members of a generation, by rank. Looking one up costs the same in a generation of any size."""

    JSON_FORM: ClassVar[object] = tuple[int, ...]

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        return {member: rank for rank, member in enumerate(self)}

    def __contains__(self, worker: object) -> bool:
        return worker in self.ranks


def _updated(numbers: Numbers, changed: Collection[int], inside: Collection[int]) -> Numbers:
    """Of the `changed` numbers those `inside` are in the set afterwards, and the others are not."""
    staying = frozenset(inside)
    gone = [number for number in changed if number in numbers and number not in staying]
    new = [number for number in inside if number not in numbers]
    numbers = numbers.minus(gone) if gone else numbers
    return numbers.plus(new) if new else numbers

"""Slots, workers and members: one of each as a record, all of them as tables that answer what the rules ask of them.

The rules run after every event. Each table keeps the counts and the indexes that they read, so that a rule costs as
much as what it changes, however many nodes there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar

from elastic.core.tables import Numbers, Table, bucket_of


class SlotPhase(str, Enum):
    PENDING = "pending"
    PLACED = "placed"


class WorkerPhase(str, Enum):
    STARTING = "starting"
    READY = "ready"


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
    """One worker process. A dead worker is removed; its successor in the same slot has a new number.

    Whether it is inside a generation is not said here: all members enter and leave at once (`Fleet.inside`).
    `since`: when its phase began, or it had its time anew; `before_s`: for how long it had been in the phase then.
    `lasting`: see `WorkerReady`.
    """

    id: int
    slot: int
    phase: WorkerPhase
    since: float
    pid: int | None = None
    host: str = ""
    lasting: int = 0
    before_s: float = 0.0


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
    """`starting` are those that are not ready yet, in the order in which their time for it ends."""

    __slots__ = ("_by_slot", "starting")
    JSON_FORM = Mapping[int, Worker]
    starting: Numbers
    _by_slot: Table[tuple[int, ...]]

    def in_slot(self, slot: int) -> list[Worker]:
        return [self[number] for number in self.numbers_in(slot)]

    def numbers_in(self, slot: int) -> tuple[int, ...]:
        """The numbers of the workers in this slot, in the order in which they were started."""
        found: tuple[int, ...] = self._by_slot.get(slot, ())
        return found

    def _index(self, before: Workers | None, put: Mapping[int, Worker], gone: Collection[int]) -> None:
        self.starting = before.starting if before is not None else Numbers()
        self._by_slot = before._by_slot if before is not None else Table()
        come: dict[int, list[int]] = {}
        for number, worker in put.items():
            if before is None or number not in before:
                come.setdefault(worker.slot, []).append(number)
        if come:
            self._by_slot = self._by_slot.put({s: (*self._by_slot.get(s, ()), *more) for s, more in come.items()})
        for number in gone:
            assert before is not None
            slot = before[number].slot
            rest = tuple(other for other in self._by_slot[slot] if other != number)
            self._by_slot = self._by_slot.put({slot: rest}) if rest else self._by_slot.without((slot,))
        starting = [number for number, worker in put.items() if worker.phase is WorkerPhase.STARTING]
        starting.sort(key=lambda number: put[number].since)
        # One that has its time anew comes after all others.
        anew = [number for number in starting if before is not None and number in before.starting]
        self.starting = _updated(self.starting.minus(anew), (*put, *gone), starting)


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

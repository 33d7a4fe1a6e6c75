"""Which events of each worker are in the journal: so long it has to keep them for another controller."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic.core import events as ev


class Acks:
    """`heard` as events come; `taken` as a turn begins with them, whose lines then wait; `written` when none waits.

    A worker numbers its messages, and they are taken in the order in which they came: a number stands for all before.
    """

    def __init__(self) -> None:
        # By identity: a worker that has sent the same twice has sent it under two numbers.
        self._heard: dict[int, tuple[int, int]] = {}
        self._taken: dict[int, int] = {}
        self._durable: dict[int, int] = {}

    def heard(self, event: ev.Event, worker: int, number: int) -> None:
        """It waits to be taken, and is not to be copied until then."""
        self._heard[id(event)] = worker, number

    def taken(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            worker, number = self._heard.pop(id(event), (None, 0))
            if worker is not None:
                self._taken[worker] = number

    def written(self) -> None:
        self._durable.update(self._taken)
        self._taken.clear()

    def durable(self, worker: int) -> int:
        """The number of its last event that no other controller will miss; 0 for none."""
        return self._durable.get(worker, 0)

    def retain(self, workers: Collection[int]) -> None:
        """The others are not part of the run any more."""
        self._durable = {worker: number for worker, number in self._durable.items() if worker in workers}

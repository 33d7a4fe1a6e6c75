"""Which events of each worker are in the journal. A worker keeps the others, for the next controller."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from elastic.core import events as ev


class Acks:
    """Call order for an event: `heard` when it arrives, `taken` when its record is noted, `written` when that is
    durable.

    A worker numbers its messages, and they are taken in the order of arrival: a number stands for all before it.
    """

    def __init__(self) -> None:
        # By identity: a worker that has sent the same event twice has sent it under two numbers.
        self._heard: dict[int, tuple[int, int]] = {}
        self._taken: deque[tuple[int, int, int]] = deque()
        self._durable: dict[int, int] = {}

    def heard(self, event: ev.Event, worker: int, number: int) -> None:
        """The event waits to be taken, and must not be copied until then."""
        self._heard[id(event)] = worker, number

    def taken(self, events: Iterable[ev.Event], noted: int) -> None:
        """Their records are among the first `noted` records."""
        for event in events:
            worker, number = self._heard.pop(id(event), (None, 0))
            if worker is not None:
                self._taken.append((noted, worker, number))

    def written(self, durable: int) -> None:
        """The first `durable` records are in the journal."""
        while self._taken and self._taken[0][0] <= durable:
            _, worker, number = self._taken.popleft()
            self._durable[worker] = number

    def durable(self, worker: int) -> int:
        """The number of its last event that is in the journal; 0 for none."""
        return self._durable.get(worker, 0)

    def retain(self, workers: Collection[int]) -> None:
        """Forget all other workers."""
        self._durable = {worker: number for worker, number in self._durable.items() if worker in workers}

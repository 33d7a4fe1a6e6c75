"""Simulated time: a heap of calls. Not random: calls at equal times are served in the order of their scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, call, args))

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, call, *args)

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Serve calls until `over()` is true or the next call is later than `until`."""
        while self._heap and not over():
            if self._heap[0][0] > until:
                self.now = until
                return
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)

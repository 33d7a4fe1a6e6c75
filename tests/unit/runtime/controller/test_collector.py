"""The controller's garbage collector: seldom, and still there."""

from __future__ import annotations

import gc

from elastic.runtime.controller.collector import collect_seldom


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_a_lost_generation_allocates_is_looked_at_a_few_times_and_cycles_are_still_found() -> None:
    before = gc.get_threshold()
    looks = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: looks.append(info) if phase == "start" else None)
    try:
        collect_seldom()
        _kept = [[number] for number in range(500_000)]
        alive = sum(info["generation"] == 2 for info in looks)
        assert (alive, 0 < len(looks) <= 12) == (0, True)
        for _ in range(60_000):
            Cycle()
        assert sum(isinstance(found, Cycle) for found in gc.get_objects(generation=0)) < 55_000
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()

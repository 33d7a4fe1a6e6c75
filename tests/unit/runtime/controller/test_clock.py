"""The controller's clock, and what a wall clock that is set does to a run: nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from controller_life import SETTINGS, Controller, begun

from elastic.core import events as ev
from elastic.runtime.controller import clock as clocks
from elastic.runtime.controller.clock import RunClock
from elastic.runtime.messages import Beat


class Time:
    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1_000_000.0, 50.0

    def pass_(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    def clock(self, not_before: float = 0.0) -> RunClock:
        return RunClock(not_before, lambda: self.wall_s, lambda: self.monotonic_s)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_setting_the_wall_clock_moves_nothing(jump_s: float) -> None:
    time = Time()
    clock = time.clock()
    time.pass_(5.0)
    time.wall_s += jump_s
    assert clock.now() == 1_000_005.0
    assert clock.from_wall(time.wall_s + 30.0) == clock.now() + 30.0


def test_an_incarnation_begins_after_the_one_before_whatever_its_wall_clock_says() -> None:
    time = Time()
    before = time.clock().now()
    time.wall_s -= 3600.0
    assert time.clock(before).now() == before


def test_a_frozen_node_is_noticed_as_soon_after_the_wall_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    monkeypatch.setattr(clocks.RunClock.__init__, "__defaults__", (0.0, lambda: time.wall_s, lambda: time.monotonic_s))
    begun(tmp_path)
    controller = Controller(tmp_path)
    loop = controller.loop
    for _ in range(20):
        time.pass_(0.2)
        for node, worker in (("node-a", 0), ("node-b", 1)):
            loop.heartbeats.beat(Beat(node, {worker: 0.0}), loop.clock.now())
        loop.heartbeats.look(loop.clock.now())
    time.wall_s -= 3600.0
    for _ in range(8):
        time.pass_(0.2)
        loop.heartbeats.beat(Beat("node-a", {0: 0.0}), loop.clock.now())
        loop.heartbeats.look(loop.clock.now())
    (silence,) = [event for event in controller.queue if isinstance(event, ev.WorkersSilent)]
    assert silence.nodes == ("node-b",)
    assert silence.silence_s < SETTINGS.failures.suspect_after_s + 0.5


def test_the_controller_forgets_lost_nodes_so_that_the_last_one_is_watched_as_closely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    monkeypatch.setattr(clocks.RunClock.__init__, "__defaults__", (0.0, lambda: time.wall_s, lambda: time.monotonic_s))
    begun(tmp_path)
    controller = Controller(tmp_path)
    loop = controller.loop

    async def scenario() -> list[Any]:
        controller.begin()
        for _ in range(20):
            time.pass_(0.2)
            for node, worker in (("node-a", 0), ("node-b", 1)):
                loop.heartbeats.beat(Beat(node, {worker: 0.0}), loop.clock.now())
            loop.heartbeats.look(loop.clock.now())
        controller.queue.append(ev.SlotLost(1, "gone"))
        await controller.turn()
        for _ in range(10):
            time.pass_(0.2)
            loop.heartbeats.look(loop.clock.now())
        return [event for event in controller.queue if isinstance(event, ev.WorkersSilent)]

    silent = asyncio.run(scenario())
    assert [event.nodes for event in silent] == [("node-a",)] * len(silent)
    assert silent

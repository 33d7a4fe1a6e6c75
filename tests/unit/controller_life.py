"""One life of a controller over a journal, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic.core import events as ev
from elastic.core.settings import RunSettings, ScalingSettings
from elastic.observe.journal import JournalWriter
from elastic.runtime.controller.actor import ControllerActor
from elastic.runtime.controller.control_loop import ControlLoop
from elastic.runtime.controller.records import Records
from elastic.runtime.controller.replay import replay
from elastic.runtime.messages import Item, Reply

LIMIT_S = 20.0
SETTINGS = RunSettings("run", scaling=ScalingSettings(2, 2), max_steps=10)
# A run of two workers, of which one has joined.
BEGUN = (
    ev.RunStarted(), ev.SlotPlaced(0, "node-a"), ev.SlotPlaced(1, "node-b"), ev.WorkerReady(0, 100, "a"),
    ev.WorkerReady(1, 101, "b"), ev.GroupJoined(1, 0),
)  # fmt: skip


def actor_with(**parts: Any) -> Any:
    """Of a controller's actor what answers calls once it has started, or has failed to."""
    actor: Any = SimpleNamespace(**{"_ready": asyncio.Event(), "_failed": None, "_settings": SETTINGS, **parts})
    actor._begun = partial(ControllerActor._begun, actor)
    actor._ready.set()
    return actor


class Controller:
    """One life of a controller: its journal, its loop, and the `deliver` of the actor. Nothing is carried out."""

    def __init__(self, url: Path, limit_s: float = LIMIT_S) -> None:
        self.journal = JournalWriter(str(url), "run")
        self.records = Records(limit_s=limit_s)
        self.queue: list[ev.Event] = []
        old = replay(self.journal.replayed, SETTINGS)
        self.loop = ControlLoop(SETTINGS, old, self.records, self.queue.append, lambda: None)
        nobody: Any = SimpleNamespace(perform=lambda action: None, placed=lambda slot, node: None)
        self.loop.connect(nobody, nobody)
        self.actor: Any = actor_with(_journal=self.journal, _loop=self.loop)
        self.actor.deliver = partial(ControllerActor.deliver, self.actor)

    def begin(self) -> None:
        """Opened only now: what is asked for in between must not be on its thread."""
        self.records.open(self.journal)

    async def deliver(self, items: Sequence[Item], heard: int | None) -> Reply:
        return await ControllerActor.deliver(self.actor, 0, items, heard)

    async def turn(self) -> None:
        events, self.queue[:] = list(self.queue), []
        await self.loop.turn(events)


def begun(url: Path, events: Sequence[ev.Event] = BEGUN) -> None:
    """A journal with these events, which no controller may have been able to handle."""
    writer = JournalWriter(str(url), "run")
    for number, event in enumerate(events):
        writer.append({"type": "event", "now": 1.0 + number, **ev.to_json(event)})


def item(event: ev.Event, number: int) -> Item:
    return Item("event", ev.to_json(event), number=number)


JOINED, FAILED = ev.GroupJoined(1, 0), ev.CollectiveFailed(1, 0, 0, "peer closed")

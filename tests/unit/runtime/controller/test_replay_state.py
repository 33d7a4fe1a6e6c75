"""A controller that restarts from a replay point is in the state, and has the books, of one that replays everything."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_life import Controller

from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.core.settings import RunSettings, ScalingSettings
from elastic.core.typed_json import encode
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.story import story
from elastic.runtime.controller import records as records_of
from elastic.runtime.controller.replay import Replayed, replay
from elastic.runtime.controller.replay_state import reader

SETTINGS = RunSettings("run", scaling=ScalingSettings(1, 2), max_steps=1_000_000)
BATCH = 4


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_of, "UNABRIDGED", 2000)
    monkeypatch.setattr("controller_life.SETTINGS", SETTINGS)


class Run:
    """A run whose two workers are lost and replaced, through a real control loop and a real journal."""

    def __init__(self, url: Path, seed: int) -> None:
        self.url, self.chance, self.slot = url, random.Random(seed), 0
        self.controller = Controller(url)
        self.controller.begin()

    async def turn(self, *events: ev.Event) -> None:
        self.controller.queue.extend(events)
        while self.controller.queue:
            await self.controller.turn()

    async def settled(self) -> None:
        """Every record and every point is written."""
        records = self.controller.records
        await records.write()
        await asyncio.get_running_loop().run_in_executor(records._points, lambda: None)
        while records._point is not None:
            await asyncio.sleep(0)

    async def live(self, rounds: int) -> None:
        await self.turn(ev.RunStarted())
        for number in range(1, rounds + 1):
            await self._round()
            if number % 5 == 0:
                # Points are made concurrently; a busy machine must not come to fewer of them.
                await self.settled()
        await self.settled()

    async def _round(self) -> None:
        """Whatever is missing arrives, some steps are done, and perhaps a worker dies."""
        state = self.controller.loop.state
        for slot in [slot for slot in state.fleet.slots.values() if slot.node is None]:
            await self.turn(ev.SlotPlaced(slot.id, f"node-{self.chance.randrange(5)}"))
        for worker in [w for w in self.controller.loop.state.fleet.workers.values() if w.pid is None]:
            await self.turn(ev.WorkerReady(worker.id, 100 + worker.id, "host"))
        state = self.controller.loop.state
        if state.saved.survey is not None:
            await self.turn(ev.SnapshotsReported(state.saved.survey.number))
        await self._train()
        state = self.controller.loop.state
        if state.members and self.chance.random() < 0.4:
            dead, *others = self.chance.sample(state.members, len(state.members))
            await self.turn(ev.WorkerDied(dead, "killed"))
            step = self.controller.loop.telemetry.step
            await self.turn(*(ev.WorkerLeft(state.generation, worker, step) for worker in others))
        await self.turn(ev.Tick())

    async def _train(self) -> None:
        state = self.controller.loop.state
        generation, members = state.generation, state.members
        await self.turn(*(ev.GroupJoined(generation, worker) for worker in members))
        await self.turn(*(ev.TrainingReached(generation, worker, state.start_step) for worker in members))
        first = self.controller.loop.telemetry.step
        for step in range(first + 1, first + self.chance.randrange(1, 6)):
            for rank in range(len(members)):
                share = BATCH // len(members)
                start = BATCH * (step - 1) + share * rank
                report = StepReport(step, 1.0 / step, ((start, start + share),), share, 0.5, generation=generation,
                                    rank=rank, metrics={"step": step})  # fmt: skip
                done, told = self.controller.loop.telemetry.report(report, self.controller.loop.clock.now())
                assert done is None or told is None or done.first
                self.controller.queue.extend([told] if told else [])
        await self.turn()
        step = self.controller.loop.telemetry.step
        if step and self.chance.random() < 0.5 and members:
            await self.turn(ev.CheckpointCommitted(f"step-{step:08d}-g{generation:04d}", step, generation))


def known(old: Replayed) -> dict[str, Any]:
    """What a replay gives, without the attribution of time, which the living controller knows better."""
    books = old._telemetry.books()
    return {
        "state": old.state, "attempt": old.attempt, "begun": old.begun, "generation": old.generation,
        "skips": old.skips, "unknown": old.unknown, "events": old.events, "faults": old.faults,
        "table": encode(books.table), "samples": encode(books.samples), "step": (books.step, books.loss),
        "metrics": books.metrics, "running": books.generation,
    }  # fmt: skip


def both(url: Path) -> Iterator[tuple[JournalWriter, Replayed]]:
    """Restarted with the newest point, and then without any."""
    for read_point in (reader(SETTINGS), None):
        writer = JournalWriter(str(url), "run", read_point=read_point)
        yield writer, replay(writer.replayed, SETTINGS, writer.problems, writer.point)


@pytest.mark.parametrize("seed", range(12))
def test_a_point_and_what_follows_it_is_a_replay_of_everything(tmp_path: Path, seed: int) -> None:
    asyncio.run(Run(tmp_path, seed).live(25))
    (abridged, short), (whole, long) = both(tmp_path)
    assert abridged.point is not None, "no point was made"
    assert len(abridged.replayed) < len(whole.replayed) / 2
    assert known(short) == known(long)
    now = max(short.last_time, long.last_time) + 1.0
    held = [sum(replayed._telemetry.time.held_nanoseconds(now).values()) for replayed in (short, long)]
    assert held[0] == held[1] > 0
    for ledger in (short._telemetry.time, long._telemetry.time):
        assert sum(ledger.nanoseconds(now).values()) == ledger._now - ledger._start, "every instant has one owner"


@pytest.mark.parametrize("seed", range(4))
def test_a_new_attempt_knows_the_same_from_a_point(tmp_path: Path, seed: int) -> None:
    asyncio.run(Run(tmp_path, seed).live(20))
    writers = [JournalWriter(str(tmp_path), "run", read_point=read) for read in (reader(SETTINGS), None)]
    assert writers[0].point is not None
    short, long = [Replayed.nothing(SETTINGS, writer) for writer in writers]
    assert known(short)["samples"] == known(long)["samples"]
    assert (short.generation, short.skips, short.begun, short.events) == (long.generation, long.skips, False, 0)


def test_an_attempt_that_began_after_the_point_is_replayed_from_its_start(tmp_path: Path) -> None:
    asyncio.run(Run(tmp_path, 1).live(20))
    later = JournalWriter(str(tmp_path), "run")
    later.append({"type": "event", "now": 9e9, "number": 1, **ev.to_json(ev.RunStarted((), 50))})
    (abridged, short), (_, long) = both(tmp_path)
    assert abridged.point is not None
    assert known(short) == known(long)
    assert (short.attempt, short.generation, short.state.fleet.workers) == (later.incarnation, 50, {})


def test_a_controller_that_had_to_ask_is_not_replayed_to_before_its_question(tmp_path: Path) -> None:
    """Without points, what follows a damaged event is unknown to all later controllers as well."""
    run = Run(tmp_path, 3)
    asyncio.run(run.live(20))
    segment = tmp_path / "run/journal/000001.jsonl"
    lines = segment.read_text().splitlines(keepends=True)
    damaged = next(i for i, line in enumerate(lines) if '"type":"event"' in line and i > 5)
    lines[damaged] = lines[damaged].replace('"now"', '"nov"', 1)
    segment.write_text("".join(lines))
    (_, short), (_, long) = both(tmp_path)
    assert (short.unknown, long.unknown) == (False, True)
    assert short.state == run.controller.loop.state


def test_a_restart_reads_as_much_of_a_long_run_as_of_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_of, "UNABRIDGED", 1 << 16)
    sizes = []
    for count in (2_000, 20_000):
        url = tmp_path / str(count)
        asyncio.run(_steps(url, count))
        tracemalloc.start()
        writer = JournalWriter(str(url), "run", read_point=reader(SETTINGS))
        old = replay(writer.replayed, SETTINGS, writer.problems, writer.point)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert old._telemetry.step == count
        assert old._telemetry.samples.result(BATCH * count).each_once
        sizes.append((writer.read_and_written, peak))
        read = JournalReader(str(url), "run").records()
        assert sum(len(record["steps"]) for record in read if record["type"] == "steps") == count
        assert story(read)
    assert sizes[1][0] < 3 << 16
    assert sizes[1][1] < 4 << 20, "memory grows with the length of the run: all records take 24 MB"


async def _steps(url: Path, count: int) -> None:
    """One worker that trains and nothing else."""
    run = Run(url, 0)
    await run.turn(ev.RunStarted(), ev.SlotPlaced(0, "a"), ev.WorkerReady(0, 1, "a"))
    loop = run.controller.loop
    while loop.state.generation == 0:
        await run.turn(ev.SlotPlaced(1, "b"), ev.WorkerReady(1, 2, "b"))
    members, generation = loop.state.members, loop.state.generation
    await run.turn(*(ev.GroupJoined(generation, worker) for worker in members))
    await run.turn(*(ev.TrainingReached(generation, worker, 0) for worker in members))
    share = BATCH // len(members)
    for step in range(1, count + 1):
        for rank in range(len(members)):
            start = BATCH * (step - 1) + share * rank
            report = StepReport(step, 1.0, ((start, start + share),), share, 0.5, generation=generation, rank=rank)
            _, told = loop.telemetry.report(report, loop.clock.now())
            run.controller.queue.extend([told] if told else [])
        if step % 100 == 0:
            await run.turn()
            await run.controller.turn()
            await run.controller.records.write()
    await run.settled()

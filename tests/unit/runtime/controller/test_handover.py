"""From one controller to the next: what the first had taken and not written down, the second is told again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from controller_life import BEGUN, FAILED, JOINED, LIMIT_S, Controller, actor_with, begun, item
from short_run import step_report

from elastic.core import events as ev
from elastic.core.errors import ElasticError
from elastic.core.typed_json import encode
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.runtime import names
from elastic.runtime.controller.acks import Acks
from elastic.runtime.controller.actor import ControllerActor
from elastic.runtime.messages import Item, Post, Reply
from elastic.runtime.worker.outbox import Outbox

TRAINS = ev.TrainingReached(1, 0, 0)


@pytest.mark.parametrize(
    "call", [ControllerActor.progress, lambda actor: ControllerActor.wait_step(actor, 1, 1.0)], ids=["progress", "wait"]
)
def test_a_start_that_failed_is_told_with_its_cause(call: Any) -> None:
    async def scenario() -> None:
        with pytest.raises(ElasticError, match="'run' did not start: PermissionError"):
            await call(actor_with(_failed=repr(PermissionError("no bucket"))))

    asyncio.run(scenario())


def test_an_event_is_durable_when_it_is_in_the_journal_and_not_when_it_was_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun(tmp_path)
        controller = Controller(tmp_path)
        controller.begin()
        assert await controller.deliver([item(JOINED, 1), item(FAILED, 2)], None) == Reply(2, durable=0)
        # Killed here, both would be in no journal.
        await controller.turn()
        assert await controller.deliver([], 2) == Reply(2, durable=2)
        read = JournalWriter(str(tmp_path), "run").replayed
        assert [record["event"] for record in read if record.get("type") == "event"][-2:] == [
            "GroupJoined", "CollectiveFailed",
        ]  # fmt: skip

    asyncio.run(scenario())


def test_what_an_agent_passes_on_late_does_not_come_after_what_the_worker_has_sent_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun(tmp_path)
        controller = Controller(tmp_path)
        controller.begin()

        async def passed_on(worker: int, heard: int, *items: Item) -> tuple[Reply, int]:
            known = len(controller.queue)
            replies = await ControllerActor.deliver_all(controller.actor, {worker: Post(heard, items)})
            assert list(replies) == [worker]
            return replies[worker], len(controller.queue) - known

        assert await passed_on(0, 2, item(JOINED, 1)) == (Reply(2), 1)
        await controller.deliver([item(TRAINS, 2), item(FAILED, 3)], 2)
        # The worker has waited for its agent long enough.
        assert await passed_on(0, 2, item(JOINED, 1), item(TRAINS, 2)) == (Reply(2), 0)
        await controller.turn()
        assert await passed_on(0, 2, item(TRAINS, 2)) == (Reply(2, durable=3), 0)
        assert await passed_on(0, 2, item(JOINED, 4)) == (Reply(2, durable=3), 1)
        # As if they had come from the worker itself: it has to hear of this controller, or that it is none of the run.
        assert await passed_on(0, 1, item(JOINED, 5)) == (Reply(2, taken=False), 0)
        assert await passed_on(7, 2, item(JOINED, 1)) == (Reply(2, fenced=True), 0)

    asyncio.run(scenario())


def test_what_waits_for_storage_is_not_durable_until_storage_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        begun(tmp_path)
        controller = Controller(tmp_path, limit_s=0.01)
        controller.begin()
        gate, extend = threading.Event(), controller.journal.extend

        def slow(lines: Sequence[dict[str, Any]]) -> Any:
            assert gate.wait(LIMIT_S)
            return extend(lines)

        monkeypatch.setattr(controller.journal, "extend", slow)
        assert (await controller.deliver([item(JOINED, 1)], None)).durable == 0
        await controller.turn()
        # The run continues meanwhile: what it decides is not held up.
        assert controller.records.failing
        assert (await controller.deliver([item(FAILED, 2)], 2)).durable == 0
        await controller.turn()
        assert (await controller.deliver([], 2)).durable == 0
        gate.set()
        await controller.records.write(limit_s=LIMIT_S)
        await controller.turn()
        assert (await controller.deliver([], 2)).durable == 2

    asyncio.run(scenario())


def test_a_controller_takes_nothing_from_who_has_something_older_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun(tmp_path)
        controller = Controller(tmp_path)
        assert await controller.deliver([item(FAILED, 7)], 1) == Reply(2, taken=False)
        assert controller.queue == []
        assert (await controller.deliver([item(FAILED, 7)], 2)).taken
        assert controller.queue == [FAILED]

    asyncio.run(scenario())


def test_acks_are_by_event_and_not_by_its_content() -> None:
    acks, same = Acks(), ev.GroupJoined(1, 0)
    first, second = ev.GroupJoined(1, 0), same
    acks.heard(first, 3, 1)
    acks.heard(second, 3, 2)
    acks.taken([first], 1)
    acks.written(1)
    assert (acks.durable(3), acks.durable(4)) == (1, 0)
    acks.taken([second, ev.Tick()], 1)
    assert acks.durable(3) == 1
    acks.written(1)
    assert acks.durable(3) == 2
    acks.retain({4})
    assert acks.durable(3) == 0


class Life:
    """One life of a controller as an outbox sees it: it takes what it is given, and has so many events on disk."""

    def __init__(self, incarnation: int, durable: int = 0) -> None:
        self.incarnation, self.durable = incarnation, durable
        self.taken: list[Any] = []


class Lives:
    """The one that lives now answers; who knows another has to begin with what that one may have lost."""

    def __init__(self, life: Life) -> None:
        self.life: Life | None = life
        self._changed = threading.Condition()

    def __call__(self, items: Sequence[Item], heard: int | None) -> Reply:
        with self._changed:
            life = self.life
            if life is None:
                raise ray.exceptions.ActorUnavailableError("restarting", None)
            if heard not in (None, life.incarnation):
                return Reply(life.incarnation, taken=False)
            life.taken += [item.data for item in items]
            self._changed.notify_all()
            return Reply(life.incarnation, durable=life.durable)

    def wait(self, count: int) -> list[Any]:
        """What the one that lives has taken, once that is so many messages."""
        with self._changed:
            life = self.life
            assert life is not None
            assert self._changed.wait_for(lambda: len(life.taken) >= count, LIMIT_S), life.taken
            return life.taken

    def be(self, life: Life | None) -> None:
        with self._changed:
            self.life = life


def outbox(lives: Lives) -> Outbox:
    return Outbox(lives, on_fenced=lambda: None, retry_s=0.001)


def test_the_next_controller_is_told_first_what_the_one_before_had_not_written_down() -> None:
    lives = Lives(Life(1, durable=1))
    box = outbox(lives)
    box.put(Item("event", "in the journal"))
    lives.wait(1)
    box.put(Item("event", "taken, and not written down"))
    box.put(Item("step", "a step", replay=True))
    box.put(Item("cadence", "told once"))
    box.put(Item("shard", "a shard", replay=True))
    lives.wait(5)
    assert box.drained(LIMIT_S)
    lives.be(None)
    box.put(Item("event", "said meanwhile"))
    lives.be(Life(2, durable=6))
    assert lives.wait(4) == ["taken, and not written down", "a step", "a shard", "said meanwhile"]
    assert box.drained(LIMIT_S)
    # What is in the journal by now is not told to the third one; what only a controller's memory has, always.
    lives.be(Life(3))
    box.restarted(3)
    assert lives.wait(2) == ["a step", "a shard"]
    box.close()


def test_a_worker_that_has_nothing_new_to_say_tells_the_next_controller_all_the_same() -> None:
    lives = Lives(Life(1))
    box = outbox(lives)
    box.put(Item("event", "I have left"))
    lives.wait(1)
    assert box.drained(LIMIT_S)
    lives.be(Life(2))
    box.restarted(2)
    assert lives.wait(1) == ["I have left"]
    # Heard a second time, it is no third controller.
    box.restarted(2)
    box.put(Item("event", "and now?"))
    assert lives.wait(2) == ["I have left", "and now?"]
    assert box.drained(LIMIT_S)
    box.close()


def test_numbers_that_were_in_use_are_read_from_the_names_of_what_was_found() -> None:
    found = [names.worker("run", 2, 11), names.worker("run", 2, 9), names.worker("run", 1, 99), names.slot("run", 2, 4),
             names.agent("run", 2, "abc"), names.controller("run")]  # fmt: skip
    assert names.next_worker("run", 2, found) == 12
    assert names.next_slot("run", 2, found) == 5
    assert names.next_slot("run", 3, found) == 0


def test_step_times_are_measured_once_and_facts_are_journaled_when_they_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun(tmp_path, (*BEGUN, ev.TrainingReached(1, 0, 0), ev.TrainingReached(1, 1, 0)))
        controller = Controller(tmp_path)
        controller.begin()
        loop = controller.loop
        loop.telemetry.generation_begins(1, 2, 0, 0.0)
        for step in range(1, 20):
            for rank in (0, 1):
                loop.deliver(rank, [Item("step", step_report(step, rank), step)], float(step))
            await controller.turn()
        await controller.records.write(limit_s=LIMIT_S)
        assert loop.state.meter.measured.step_s.keys() == {2}
        journal = JournalReader(str(tmp_path), "run").records()
        assert [r["event"] for r in journal if r.get("event") == "StepTimeMeasured"] == ["StepTimeMeasured"]
        (facts,) = [r for r in journal if r["type"] == "facts" and r["measured"]["step_s"]]
        assert facts["measured"] == encode(loop.state.meter.measured)

    asyncio.run(scenario())

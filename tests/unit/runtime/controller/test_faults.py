"""A controller whose own code fails: what is written down, and how the next incarnation continues without the cause."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from controller_life import BEGUN, JOINED, SETTINGS, Controller, begun, item

from elastic.core import events as ev
from elastic.core.run import generations, machine
from elastic.core.run.state import RunState
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.runtime.controller.faults import KIND, MOST_IN_A_ROW, Faults
from elastic.runtime.controller.records import Records
from elastic.runtime.controller.replay import replay
from elastic.runtime.messages import Item

POISON = ev.CollectiveFailed(1, 0, 3, "poison")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that raises for one event, as a bug would."""
    step = machine.step

    def rule(state: RunState, event: ev.Event, now: float) -> Any:
        if event == POISON:
            raise ZeroDivisionError("a bug")
        return step(state, event, now)

    monkeypatch.setattr(machine, "step", rule)


def life(url: Path, *events: ev.Event) -> tuple[Controller, Exception | None]:
    """One incarnation that gets these events of worker 0 and writes down what it could not handle."""
    controller = Controller(url)

    async def scenario() -> Exception | None:
        controller.begin()
        await controller.deliver([item(event, i + 1) for i, event in enumerate(events)], None)
        try:
            await controller.turn()
        except ZeroDivisionError as error:
            record = controller.loop.fault(error)
            if record is not None:
                await controller.records.write([record], limit_s=20.0)
            return error
        return None

    return controller, asyncio.run(scenario())


def faults(url: Path) -> list[Any]:
    return [r for r in JournalReader(str(url), "run").records() if r.get("kind") == KIND]


def test_the_next_incarnation_goes_on_without_the_event_that_the_last_one_could_not_handle(
    tmp_path: Path, poisoned: None
) -> None:
    begun(tmp_path)
    _, error = life(tmp_path, JOINED, POISON, ev.GroupJoined(1, 1))
    assert isinstance(error, ZeroDivisionError)
    (record,) = faults(tmp_path)
    assert record["sentence"].startswith("the controller could not handle CollectiveFailed: ZeroDivisionError: a bug")
    assert "ZeroDivisionError" in record["data"]["traceback"]
    assert record["data"]["event_number"] == len(BEGUN) + 2
    # The worker does not know that its event was taken, and sends it again.
    second, error = life(tmp_path, POISON, ev.TrainingReached(1, 0, 0))
    assert error is None
    assert len(faults(tmp_path)) == 1
    assert second.loop.state.phase.joined == {0, 1}  # type: ignore[union-attr]
    third, error = life(tmp_path, ev.TrainingReached(1, 1, 0))
    assert error is None
    assert type(third.loop.state.phase).__name__ == "Training"


@pytest.fixture
def poisoned_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that raises for the report of worker 1, alone and together with others."""
    joined = generations.group_joined

    def rule(transition: Any, workers: Any) -> None:
        if 1 in workers:
            raise ZeroDivisionError("a bug")
        joined(transition, workers)

    monkeypatch.setattr(generations, "group_joined", rule)


def test_of_reports_that_one_turn_took_together_only_the_poisoned_one_is_left_out(
    tmp_path: Path, poisoned_report: None
) -> None:
    begun(tmp_path, BEGUN[:-1])
    _, error = life(tmp_path, JOINED, ev.GroupJoined(1, 1))
    assert isinstance(error, ZeroDivisionError)
    (record,) = faults(tmp_path)
    assert record["sentence"].startswith("the controller could not handle GroupJoined")
    second, error = life(tmp_path, JOINED, ev.GroupJoined(1, 1))
    assert error is None
    assert second.loop.state.phase.joined == {0}  # type: ignore[union-attr]
    assert not second.loop.state.trouble.incident


def test_where_only_the_whole_group_fails_its_reports_are_taken_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(transition: Any, event: ev.MembersReported) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(generations, "members_reported", rule)
    begun(tmp_path, BEGUN[:-1])
    _, error = life(tmp_path, JOINED, ev.GroupJoined(1, 1))
    assert isinstance(error, ZeroDivisionError)
    assert "takes them one after the other" in faults(tmp_path)[0]["sentence"]
    second, error = life(tmp_path)
    assert error is None
    assert second.loop.state.phase.joined == {0, 1}  # type: ignore[union-attr]


def test_a_report_that_a_replay_cannot_apply_does_not_take_the_others_of_its_turn_along(
    tmp_path: Path, poisoned_report: None
) -> None:
    """Its controller was killed before it could say so: what follows is unknown, and the other report is not."""
    begun(tmp_path, (*BEGUN[:-1], ev.MembersReported(1, "GroupJoined", (0, 1), (0, 0))))
    old = replay(JournalWriter(str(tmp_path), "run").replayed, SETTINGS)
    assert old.state.phase.joined == {0}  # type: ignore[union-attr]
    assert old.unknown


def test_the_budget_counts_faults_in_a_row_without_a_new_step() -> None:
    def record(step: int) -> dict[str, Any]:
        return {"type": "decision", "kind": KIND, "step": step, "data": {"event_number": None, "event": ""}}

    assert not Faults().more([record(5)] * (MOST_IN_A_ROW - 1)).budget_spent(5)
    assert Faults().more([record(5)] * MOST_IN_A_ROW).budget_spent(5)
    assert not Faults().more([record(5)] * MOST_IN_A_ROW).budget_spent(6)


def test_a_spent_budget_writes_no_further_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)

    def broken(state: RunState, event: ev.Event, now: float) -> Any:
        raise ZeroDivisionError(repr(event))

    for number in range(MOST_IN_A_ROW + 1):
        monkeypatch.undo()
        controller = Controller(tmp_path)
        monkeypatch.setattr(machine, "step", broken)

        async def scenario(controller: Controller = controller, number: int = number) -> bool:
            controller.begin()
            controller.queue.append(ev.SlotLost(number, "gone"))
            with pytest.raises(ZeroDivisionError) as caught:
                await controller.turn()
            record = controller.loop.fault(caught.value)
            if record is not None:
                await controller.records.write([record], limit_s=20.0)
            return record is not None

        assert asyncio.run(scenario()) == (number < MOST_IN_A_ROW)


def test_a_message_that_cannot_be_taken_does_not_stop_those_behind_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun(tmp_path)
        controller = Controller(tmp_path)
        controller.begin()
        bad = Item("step", object(), number=1)
        assert (await controller.deliver([bad, item(JOINED, 2)], None)).taken
        assert controller.queue == [JOINED]
        await controller.turn()

    asyncio.run(scenario())
    (record,) = [r for r in JournalReader(str(tmp_path), "run").records() if r.get("kind") == "unreadable"]
    assert record["sentence"].startswith("a message of worker 0 (step) could not be taken and is left out")


def test_a_record_that_json_cannot_represent_does_not_stop_the_journal(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun(tmp_path)
        controller = Controller(tmp_path)
        records = Records(limit_s=20.0)
        records.open(controller.journal)
        records.note({"type": "run", "status": object()})
        records.note({"type": "run", "status": "half a pair: \ud800"})
        with pytest.raises(TypeError, match="not JSON serializable"):
            await records.write()
        await records.write()
        assert not records.pending

    asyncio.run(scenario())
    (note, after) = [r for r in JournalReader(str(tmp_path), "run").records() if r["type"] in ("decision", "run")]
    assert note["sentence"].startswith("a record of type 'run' cannot be written")
    assert after["status"] == "half a pair: \ud800"

"""The controller's books: replay of a journal, incident records, the journal while storage is away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from short_run import EVENTS, SETTINGS, journal, live, step_report

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.core.errors import UsageError
from elastic.core.incident import Incident
from elastic.core.policy.measured import Measured
from elastic.core.run import machine
from elastic.observe import records
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.runtime import names
from elastic.runtime.controller.incidents import IncidentBook
from elastic.runtime.controller.progress import cadence_record, function_left_record, unfinished_step_record
from elastic.runtime.controller.replay import Replayed, replay
from elastic.runtime.controller.telemetry import Telemetry
from elastic.runtime.train_function import Entry
from elastic.runtime.worker import codec
from elastic.training.result import BadStep, GenerationResult

LIMIT_S = 20.0


def test_metrics_of_every_rank_reach_the_journal_and_survive_the_controller(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), "run")
    telemetry = Telemetry(SETTINGS, 0.0, lambda record: writer.append(record) and None)
    telemetry.generation_begins(1, 2, 0, 1.0)
    telemetry.report(step_report(1, 0, metrics={"val_loss": 1.0}), 2.0)
    telemetry.report(step_report(1, 1, metrics={"val_loss": 2.0, "bad": float("nan")}), 2.0)
    telemetry.flush(2.0, force=True)
    (record,) = [r for r in JournalReader(str(tmp_path), "run").records() if r["type"] == "steps"]
    (step,) = record["steps"]
    assert step["metrics"] == {"val_loss": 1.5, "bad": None}
    assert step["metrics_by_rank"] == {"val_loss": {"0": 1.0, "1": 2.0}}
    assert telemetry.metrics["val_loss"] == 1.5
    after = Telemetry(SETTINGS, 0.0, lambda record: None)
    after.replay_step(step, 2.0)
    assert after.metrics["val_loss"] == 1.5


def test_a_replayed_controller_is_in_the_very_state_of_the_one_before(tmp_path: Path) -> None:
    journal(tmp_path)
    successor = JournalWriter(str(tmp_path), "run")
    old = replay(successor.replayed, SETTINGS)
    assert old.state == live(EVENTS)
    assert (old.attempt, old.generation) == (1, old.state.generation)


def test_a_replayed_controller_keeps_the_books(tmp_path: Path) -> None:
    journal(tmp_path)
    records: list[dict[str, Any]] = []
    successor = JournalWriter(str(tmp_path), "run")
    telemetry = replay(successor.replayed, SETTINGS).telemetry(SETTINGS, 9.0, records.append)
    assert records == [], "what is in the journal is not written again"
    assert (telemetry.step, telemetry.loss) == (3, 1.0 / 3)
    assert telemetry.report(step_report(2, 0), 9.0) == (None, None), "a report that comes again changes nothing"
    counted = telemetry.samples.result(12)
    assert (counted.seen, counted.missing, counted.repeated) == (12, 0, 0)
    totals = telemetry.time.totals(9.0)
    assert sum(totals.values()) == pytest.approx(9.0)
    assert totals["productive"] > 0
    held = telemetry.time.held_totals(9.0)
    assert held["productive"] == pytest.approx(2 * totals["productive"])
    assert "queue" not in held, "nothing is held before slots are placed"


def test_a_first_step_that_was_written_down_and_not_told_is_told_with_the_next_one(tmp_path: Path) -> None:
    """The controller ended between the two. Without it the generation would never grow, nor end when it is asked to."""
    writer = JournalWriter(str(tmp_path), "run")
    telemetry = Telemetry(SETTINGS, 0.0, lambda record: writer.append(record) and None)
    for now, event in EVENTS[:9]:
        writer.append({"type": "event", "now": now, **ev.to_json(event)})
    telemetry.generation_begins(1, 2, 0, 2.0)
    told = [telemetry.report(step_report(1, rank), 5.0)[1] for rank in (0, 1)]
    telemetry.flush(5.0, force=True)
    assert told == [None, ev.FirstStepDone(1, 1)]

    after = replay(JournalWriter(str(tmp_path), "run").replayed, SETTINGS).telemetry(SETTINGS, 9.0, lambda record: None)
    assert [after.report(step_report(1, rank), 9.0) for rank in (0, 1)] == [(None, None)] * 2
    assert [after.report(step_report(2, rank), 9.0)[1] for rank in (0, 1)] == [None, ev.FirstStepDone(1, 2)]


def test_a_first_step_that_was_told_is_not_told_again(tmp_path: Path) -> None:
    journal(tmp_path)
    after = replay(JournalWriter(str(tmp_path), "run").replayed, SETTINGS).telemetry(SETTINGS, 9.0, lambda record: None)
    assert [after.report(step_report(4, rank), 9.0)[1] for rank in (0, 1)] == [None, None]


def test_a_restore_report_that_comes_twice_counts_once() -> None:
    written: list[dict[str, Any]] = []
    telemetry = Telemetry(SETTINGS, 0.0, written.append)
    telemetry.generation_begins(1, 2, 0, 0.0)
    written.clear()
    report = {"generation": 1, "world_size": 2, "checkpoint": "c", "source": "storage", "step": 0, "bytes_read": 7,
              "bytes_from": {"own_node": 3, "network": 4, "storage": 0}, "bytes_needed": 7, "read_s": 1.0,
              "install_s": 1.0, "verify_s": 1.0,
              "kept": 0, "again": ""}  # fmt: skip
    for rank in (0, 0, 1, 1):
        telemetry.restored({**report, "rank": rank})
    assert [record["bytes_read"] for record in written] == [14]


def test_only_the_last_attempt_is_replayed_and_numbers_go_on(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    writer.append({"type": "event", "now": 20.0, **ev.to_json(ev.RunStarted((("step-00000002-g0001", 2),), 1))})
    successor = JournalWriter(str(tmp_path), "run")
    assert replay(successor.replayed, SETTINGS).state.members == ()
    assert replay(successor.replayed, SETTINGS).state.generation == 1
    fresh = Replayed.nothing(SETTINGS, successor)
    assert (fresh.generation, fresh.attempt, fresh.begun) == (1, successor.incarnation, False)


def test_a_resumed_run_passes_over_what_the_attempt_before_went_back_from(tmp_path: Path) -> None:
    """An audit has failed at step 13, and the run has gone back to step 8. That of step 12 is in storage still."""
    writer = journal(tmp_path)
    data = {"suspects": [1], "nodes": [], "decided": True, "undone": [1, 8]}
    told = {"step": 13, "generation": 1, "world_size": 2, "data": data}
    writer.append(dict(records.decision("audit", "the run goes back", **told)))
    found = ev.AnomalyFound(2, 0, 20, "loss", "nan", ())
    for worker in (0, 1):
        writer.append({"type": "event", "now": 21.0, **ev.to_json(replace(found, worker=worker))})
    fresh = Replayed.nothing(SETTINGS, JournalWriter(str(tmp_path), "run"))
    assert fresh.undone == ((1, 8), (2, 20))
    checkpoints = [(1, 8), (1, 12), (2, 20), (2, 21), (3, 22)]
    assert [known for known in checkpoints if fresh.counts(*known)] == [(1, 8), (2, 20), (3, 22)]


def test_a_resumed_run_counts_the_samples_of_the_attempts_before(tmp_path: Path) -> None:
    journal(tmp_path)
    fresh = Replayed.nothing(SETTINGS, JournalWriter(str(tmp_path), "run"))
    telemetry = fresh.telemetry(SETTINGS, 9.0, lambda record: None)
    # Three steps were done, and a checkpoint covers two.
    telemetry.generation_begins(2, 1, 2, 9.0)
    assert telemetry.samples.result(8).each_once
    assert telemetry.step == 2


def test_an_incident_is_written_again_when_the_lost_steps_are_caught_up() -> None:
    records: list[dict[str, Any]] = []
    book = IncidentBook(records.append, "run")
    keys = ("bytes_read", "bytes_from", "bytes_needed", "read_s", "install_s", "verify_s")
    book.restored({"generation": 2, **dict.fromkeys(keys, 7)})
    times = {"symptom": 10.0, "detected": 10.0, "first_step": 11.0}
    book.close(
        Incident(1, "node-lost", 1, 4, 23, "gone", next_generation=2, resumed_step=20, steps_repeated=3, times=times)
    )
    for step, now in ((21, 11.0), (22, 11.5), (23, 12.0), (24, 12.5)):
        book.step_done(step, now)
    assert [record["seconds"].get("caught_up") for record in records] == [None, 2.0]
    assert records[1]["restore"]["bytes_read"] == 7
    assert "collective" in records[0]["detector"]


@pytest.mark.parametrize(
    ("result", "event"),
    [
        (GenerationResult("finished", 9, True), ev.WorkerCompleted(2, 5, 9, True)),
        (GenerationResult("ended", 9), None),
        (
            GenerationResult("collective_failed", 9, message="Read error. This is typically caused by you\nmore"),
            ev.CollectiveFailed(2, 5, 9, "Read error"),
        ),
        (
            GenerationResult("user_error", 9, error_type="ValueError", message="x", traceback="tb"),
            ev.UserCodeFailed(2, 5, 9, "ValueError: x", "tb"),
        ),
        (
            GenerationResult("anomaly", 9, bad_step=BadStep("audit", "0 against 1", (), (1,), True, 6, 5)),
            ev.AuditFailed(2, 5, 9, (1,), True, "0 against 1", 6, 5),
        ),
        (GenerationResult("usage_error", 9, message="x"), ev.UserCodeFailed(2, 5, 9, "x", "", True)),
        (GenerationResult("restore_failed", 0, message="bad", checkpoint="c"), ev.RestoreFailed(2, 5, "c", "bad")),
    ],
)
def test_outcomes_become_events(result: GenerationResult, event: ev.Event | None) -> None:
    assert codec.outcome(result, 2, 5) == event


def test_parts_of_two_attempts_have_different_names_and_one_prefix() -> None:
    first, second = names.worker("run", 1, 0), names.worker("run", 2, 0)
    assert first != second
    assert all(name.startswith(names.parts("run")) for name in (first, second, names.slot("run", 1, 0)))
    assert not names.controller("run").startswith(names.parts("run"))
    assert not names.worker("run-b", 1, 0).startswith(names.parts("run"))


def test_a_function_travels_as_itself_and_a_name_as_a_name(tmp_path: Path) -> None:
    assert Entry.of(lambda config: config["x"] + 1, {"x": 1}).load()({"x": 1}) == 2
    (tmp_path / "job_of_mine.py").write_text("def train(config):\n    return 'trained'\n")
    assert Entry.named("job_of_mine.py:train", None, str(tmp_path)).load()({}) == "trained"
    with pytest.raises(UsageError, match="no 'trian'"):
        Entry.named("job_of_mine.py:trian", None, str(tmp_path)).load()


def test_the_reissued_actions_are_those_whose_outcome_is_awaited() -> None:
    before_start = live(EVENTS[:4])
    assert act.StartWorker(1, 1) in machine.reissue(before_start)
    joining = live(EVENTS[:6])
    assert next(a for a in machine.reissue(joining) if isinstance(a, act.BeginGeneration)).generation == 1
    assert machine.reissue(live(EVENTS[:10])) == ()


def test_storage_that_is_away_condemns_no_checkpoint() -> None:
    result = GenerationResult(
        "restore_failed", 0, error_type="elastic.core.errors.StorageError", message="away", checkpoint="c"
    )
    assert codec.outcome(result, 2, 5) == ev.RestoreFailed(2, 5, "", "away")
    state = live((*EVENTS[:11], (7.0, ev.CollectiveFailed(1, 0, 3, "broken")), (7.1, ev.WorkerLeft(1, 0, 3))))
    state, _ = machine.step(state, ev.WorkerLeft(1, 1, 3), 7.1)
    assert state.saved.survey is not None
    state, _ = machine.step(state, ev.SnapshotsReported(state.saved.survey.number), 7.2)
    assert state.generation == 2
    state, _ = machine.step(state, ev.RestoreFailed(2, 0, "", "away"), 8.0)
    assert state.saved.rejected == ()
    assert state.saved.newest_checkpoint is not None


def test_how_often_snapshots_are_taken_is_written_down_with_the_reason() -> None:
    told = {"generation": 3, "rank": 0, "world_size": 4, "step": 40, "every_steps": 3, "cost_s": 0.0012, "step_s": 0.05}
    record = cadence_record(told)
    assert (record["generation"], record["step"], record["data"]["every_steps"]) == (3, 40, 3)
    assert record["sentence"] == (
        "a snapshot is taken into memory every 3 steps: one delays training by 1.2 ms, and a step takes 50 ms"
    )
    assert "at every step" in cadence_record({**told, "every_steps": 1})["sentence"]


def test_steps_keep_their_place_where_the_wall_clock_was_set_back(tmp_path: Path) -> None:
    """Older releases stamped records with the wall clock: later steps seem to lie before their generation began."""
    writer = JournalWriter(str(tmp_path), "run")
    back_s = 3600.0
    writer.append({"type": "event", "now": 4000.0, **ev.to_json(ev.RunStarted())})
    telemetry = Telemetry(SETTINGS, 4000.0, lambda record: writer.append(record) and None)
    telemetry.generation_begins(1, 1, 0, 4001.0)
    for step in (1, 2, 3, 4):
        now = 4001.0 + step - (back_s if step > 2 else 0.0)
        start = 4 * (step - 1)
        telemetry.report(StepReport(step, 0.5, ((start, start + 4),), 4, 0.5, generation=1, rank=0), now)
        telemetry.flush(now, force=True)
    telemetry.generation_begins(2, 1, 4, 4006.0 - back_s)
    successor = JournalWriter(str(tmp_path), "run")
    counted = replay(successor.replayed, SETTINGS).telemetry(SETTINGS, 500.0, lambda _: None).samples.result(16)
    assert (counted.seen, counted.missing, counted.repeated) == (16, 0, 0)


def test_a_function_that_could_not_stay_is_in_the_journal_with_its_reason() -> None:
    told = {"worker": 3, "reason": "it has made process groups", "generation": 4, "world_size": 2, "step": 9}
    record = function_left_record(told)
    assert record["sentence"] == "worker 3: the training function is left and called again: it has made process groups"
    assert (record["kind"], record["step"], record["generation"]) == ("function-left", 9, 4)


def test_a_step_that_was_lost_within_is_in_the_journal_with_what_is_kept_of_it() -> None:
    restore = {"generation": 3, "step": 9, "kept": 48, "again": []}
    record = unfinished_step_record(restore, 3)
    assert record is not None
    assert record["sentence"] == "step 10 continues: the gradients of 48 of its micro-batches are kept"
    assert (record["kind"], record["step"], record["generation"], record["world_size"]) == ("step-continued", 9, 3, 3)
    partly = unfinished_step_record({**restore, "again": ["its backward pass was under way"]}, 3)
    assert partly is not None
    assert partly["sentence"].endswith("kept, but not those of every survivor: its backward pass was under way")
    again = unfinished_step_record({**restore, "kept": 0, "again": ["in stage 2 partial sums lie on other ranks"]}, 3)
    assert again is not None
    assert again["kind"] == "step-repeated"
    assert again["sentence"] == (
        "step 10 is done again from its first micro-batch: in stage 2 partial sums lie on other ranks"
    )
    assert unfinished_step_record({**restore, "kept": 0}, 3) is None


def test_what_an_attempt_has_measured_is_known_to_the_next_one(tmp_path: Path) -> None:
    """By the last record of it, whichever attempt wrote it."""
    writer = JournalWriter(str(tmp_path), "run")
    for now, event in EVENTS:
        writer.append({"type": "event", "now": now, **ev.to_json(event)})
    measured = Measured(recovery_s=(2.5,), replacement_s=(9.0,), step_s={2: 0.5}, losses=1, node_s=16.0)
    writer.append(records.facts(replace(measured, losses=0)))
    writer.append(records.facts(measured))
    old = Replayed.nothing(SETTINGS, JournalWriter(str(tmp_path), "run"))
    state, _ = machine.step(machine.initial(SETTINGS, 99.0), ev.RunStarted(measured=old.measured), 99.0)
    assert state.meter.measured == measured

"""A controller whose journal is damaged: no bit may keep it from starting, and what is lost is unknown, not guessed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from short_run import EVENTS, SETTINGS, journal, live

from elastic.core import events as ev
from elastic.core.run.state import RunState
from elastic.observe import records as schema
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.journal_lines import to_line
from elastic.observe.story import story
from elastic.observe.summary import summarize
from elastic.runtime.controller.replay import Replayed, replay

SEGMENT = "run/journal/000001.jsonl"


def restarted(url: Path) -> tuple[Replayed, JournalWriter]:
    writer = JournalWriter(str(url), "run")
    return replay(writer.replayed, SETTINGS, writer.problems), writer


def prefixes() -> list[RunState]:
    return [live(EVENTS[:count]) for count in range(1, len(EVENTS) + 1)]


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_is_found_and_never_believed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    journal(tmp_path)
    data = bytearray((tmp_path / SEGMENT).read_bytes())
    place = chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    (tmp_path / SEGMENT).write_bytes(bytes(data))
    old, writer = restarted(tmp_path)
    assert writer.problems, "every flip is noticed"
    assert old.state in [*prefixes(), Replayed(SETTINGS).state], "a state that the run was in, or none"
    assert old.unknown == (old.state != live(EVENTS)) or not old.begun
    old.telemetry(SETTINGS, 9.0, lambda _: None)
    resumed = Replayed.nothing(SETTINGS, writer)
    assert resumed.generation >= 1, "no generation's number is given out again"
    reader = JournalReader(str(tmp_path), "run")
    found = reader.records()
    assert [problem.sentence for problem in reader.problems] == [problem.sentence for problem in writer.problems]
    assert story(found)
    assert summarize(found)["steps"] is not None


def test_damage_to_what_is_no_event_costs_only_itself(tmp_path: Path) -> None:
    journal(tmp_path)
    text = (tmp_path / SEGMENT).read_text()
    (tmp_path / SEGMENT).write_text(text.replace('"loss":0.5', '"loss":0.6', 1))
    old, writer = restarted(tmp_path)
    (problem,) = writer.problems
    assert problem.sentence.endswith('(a "steps" record) is damaged; skipped')
    assert (old.state, old.unknown) == (live(EVENTS), False)


def test_a_resumed_run_whose_start_is_lost_is_not_taken_for_the_finished_one(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    writer.append(schema.event(ev.StopRequested("enough"), 9.0, 14))
    second = JournalWriter(str(tmp_path), "run")
    second.append(schema.run_began("run", 2))
    second.append(schema.event(ev.RunStarted((), 1), 10.0, 1))
    path = tmp_path / "run/journal/000002.jsonl"
    path.write_text(path.read_text().replace("RunStarted", "RunStartec"))
    old, third = restarted(tmp_path)
    assert (old.begun, old.unknown, old.attempt) == (False, True, third.incarnation)


def hostile() -> list[str]:
    def event(**more: Any) -> str:
        return to_line({"seq": 9, "time": 1.0, "type": "event", "now": 9.0, **more})

    return [
        "[" * 100_000 + "]" * 100_000 + "\n",
        to_line({"seq": 9, "type": "x", "a": 1})[:-2] + "\n",
        to_line({"seq": "nine", "type": "x"}),
        to_line({"seq": 9, "time": "now", "type": "x"}),
        to_line({"seq": 9, "type": 7}),
        to_line({"seq": 9, "type": "steps", "steps": "none"}),
        to_line({"seq": 9, "type": "steps", "steps": [{"step": -1}]}),
        to_line({"seq": 9, "type": "generation", "number": "x", "first_step": 1}),
        to_line({"seq": 9, "type": "begin", "read": ["x"]}),
        to_line({"seq": 9, "type": "begin", "read": {"one": 1}}),
        '{"seq":9' + "9" * 5000 + ',"type":"x"}\n',
        event(event="NoSuchEvent"),
        event(event="WorkerDied"),
        event(event="WorkerDied", worker=[], evidence=7),
        event(event="CheckpointCommitted", id="../../x", step="y", generation=None),
    ]


@pytest.mark.parametrize("line", hostile(), ids=range(len(hostile())))
def test_a_hostile_line_is_one_sentence_or_nothing(tmp_path: Path, line: str) -> None:
    writer = journal(tmp_path)
    writer._segments.append(1, line)
    old, successor = restarted(tmp_path)
    assert old.state == live(EVENTS)
    assert len(successor.problems) + old.unknown <= 2
    found = JournalReader(str(tmp_path), "run").records()
    summarize(found)
    story(found)


def test_a_segment_of_an_impossible_number_is_named_and_left_out(tmp_path: Path) -> None:
    journal(tmp_path)
    (tmp_path / "run/journal/999999999999999999.jsonl").write_text("x\n")
    old, writer = restarted(tmp_path)
    assert writer.incarnation == 2
    assert old.state == live(EVENTS)
    assert [problem.sentence for problem in writer.problems] == [
        "journal segment 999999999999999999 was not made by a controller; skipped"
    ]


def test_a_journal_of_a_release_without_checksums_is_read(tmp_path: Path) -> None:
    journal(tmp_path)
    path = tmp_path / SEGMENT
    lines = path.read_text().splitlines()
    path.write_text("".join(line[: line.rindex(',"crc"')] + "}\n" for line in lines))
    old, writer = restarted(tmp_path)
    assert (old.state, writer.problems) == (live(EVENTS), ())

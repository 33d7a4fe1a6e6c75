"""Sinks: the contract that each one is held to, and a run that no sink can harm."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_journal import journal

from elastic.observe.records import Record
from elastic.observe.sink_files import JsonLinesSink, PrometheusSink
from elastic.observe.sinks import RunInfo, Sink, SinkFeed, Sinks

LIMIT_S = 20.0
RUN = RunInfo('run "1"', 1, 2)
STEPS = {
    "type": "steps",
    "steps": [{"step": 7, "loss": None, "duration_s": 0.5, "metrics": {"val loss": 0.25, "note": "x", "on": True}},
              {"step": 8, "loss": 1.5, "duration_s": 0.25, "metrics": {"nan": float("nan")}}],
}  # fmt: skip

SINKS: list[Callable[[str], Sink]] = [JsonLinesSink, PrometheusSink]


@pytest.mark.parametrize("kind", SINKS)
def test_every_sink_takes_any_run_of_records_and_is_opened_again(kind: Callable[[str], Sink], tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "out"
    for _ in range(2):
        sink = kind(str(path))
        sink.open(RUN)
        for record in [*journal(), {"time": 1.0, **STEPS}, {"type": "of a newer version", "time": 1.0}]:
            sink.write(record)
        sink.close()
    assert path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["out"], "nothing is left next to it"


@pytest.mark.parametrize("kind", SINKS)
def test_every_sink_raises_where_it_cannot_write(kind: Callable[[str], Sink], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        kind(str(tmp_path / "file" / "out")).open(RUN)


def test_lines_are_the_journals_records(tmp_path: Path) -> None:
    sink = JsonLinesSink(str(tmp_path / "out"))
    sink.open(RUN)
    for record in journal():
        sink.write(record)
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["type"] for line in lines] == [record["type"] for record in journal()]
    assert {(line["run_id"], line["incarnation"]) for line in lines} == {('run "1"', 2)}


def test_gauges_are_the_newest_values(tmp_path: Path) -> None:
    sink = PrometheusSink(str(tmp_path / "out.prom"))
    sink.open(RUN)
    for record in [*journal()[:9], {"time": 1.0, **STEPS}]:
        sink.write(record)
    text = (tmp_path / "out.prom").read_text().splitlines()
    run = 'run="run \\"1\\""'
    assert f"elastic_running{{{run}}} 1" in text
    assert f"elastic_step{{{run}}} 8" in text
    assert f"elastic_loss{{{run}}} 1.5" in text
    assert f"elastic_world_size{{{run}}} 3" in text
    assert f"elastic_checkpoint_step{{{run}}} 80" in text
    assert f"elastic_incidents{{{run}}} 1" in text
    assert [line for line in text if "metric{" in line] == [
        f'elastic_metric{{{run},name="nan"}} NaN', f'elastic_metric{{{run},name="val loss"}} 0.25'
    ]  # fmt: skip
    sink.write(journal()[-1])
    assert f"elastic_running{{{run}}} 0" in (tmp_path / "out.prom").read_text()


class Collecting:
    """Notes what it is given, and does `before` first."""

    def __init__(self, before: Callable[[str], None] = lambda call: None) -> None:
        self.before, self.calls = before, list[Any]()

    def open(self, run: RunInfo) -> None:
        self._call("open")

    def write(self, record: Record) -> None:
        self._call(record["n"])

    def close(self) -> None:
        self._call("close")

    def _call(self, what: Any) -> None:
        self.before(what)
        self.calls.append(what)


def test_records_come_in_order_and_none_after_the_end() -> None:
    sink = Collecting()
    feed = SinkFeed("s", sink, RUN)
    for n in range(5):
        feed.put({"n": n})
    assert feed.close(LIMIT_S)
    assert sink.calls == ["open", 0, 1, 2, 3, 4, "close"]


@pytest.mark.parametrize("bad", ["open", 2, "close"])
def test_a_sink_that_raises_is_closed_and_said_once(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    def before(call: Any) -> None:
        if call == bad:
            raise RuntimeError("no more")

    sink = Collecting(before)
    feed = SinkFeed("s", sink, RUN)
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            feed.put({"n": n})
        assert feed.close(LIMIT_S)
        feed.put({"n": 9})
    assert sink.calls == {"open": ["close"], 2: ["open", 0, 1, "close"], "close": ["open", 0, 1, 2, 3, 4]}[bad]
    assert feed.failure == "RuntimeError: no more"
    assert [record.message for record in caplog.records] == [
        "sink s is closed, and the run continues: RuntimeError: no more"
    ]


def test_a_sink_that_hangs_is_never_waited_for_and_its_drops_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    let_go, entered = threading.Event(), threading.Event()

    def before(call: Any) -> None:
        if call == 0:
            entered.set()
            assert let_go.wait(LIMIT_S)

    sink = Collecting(before)
    feed = SinkFeed("s", sink, RUN, waiting=3)
    feed.put({"n": 0})
    assert entered.wait(LIMIT_S)
    with caplog.at_level(logging.WARNING):
        for n in range(1, 8):
            feed.put({"n": n})
        assert not feed.close(0.01)
    assert feed.dropped == 4
    assert len(caplog.records) == 1
    let_go.set()
    assert feed.close(LIMIT_S)
    assert sink.calls == ["open", 0, 1, 2, 3, "close"]


def test_no_sink_is_given_a_secret() -> None:
    found: list[Record] = []

    class Keeping(Collecting):
        def write(self, record: Record) -> None:
            found.append(record)

    sinks = Sinks({"s": Keeping()}, ["hunter2hunter2"])
    sinks.open(RUN)
    sinks.put({"type": "decision", "sentence": "with hunter2hunter2", "step": 3})
    sinks.close(LIMIT_S)
    (record,) = found
    assert (record["sentence"], record["step"]) == ("with ***", 3)
    assert record["time"] > 0

"""The summary is a pure function of the journal, and says nothing that the journal does not."""

from __future__ import annotations

import json
from html import escape

from sample_journal import INCIDENT, journal

from elastic.observe.html.page import page
from elastic.observe.report import report
from elastic.observe.story import story
from elastic.observe.summary import lost, summarize, with_faults
from elastic.observe.text import duration, size


def test_everything_is_there() -> None:
    summary = summarize(journal())
    assert (summary["run_id"], summary["status"], summary["steps"], summary["final_loss"]) == (
        "r1",
        "finished",
        100,
        2.5,
    )
    assert summary["generations"] == [
        {"number": 1, "world_size": 4, "mesh": {"dp": 2, "tp": 2}, "first_step": 1, "last_step": 41},
        {"number": 2, "world_size": 3, "mesh": None, "first_step": 41, "last_step": 100},
    ]
    (incident,) = summary["incidents"]
    assert incident["lost"] == "node abcdef01 (worker 2)"
    assert incident["seconds"] == {
        "detected": 0.25, "decided": 0.5, "rebuilt": 1.0, "restored": 1.5, "first_step": 2.0, "caught_up": None,
    }  # fmt: skip
    assert (incident["steps_repeated"], incident["source"]) == (1, "storage")
    assert summary["samples"] == {"seen": 2400, "missing": 0, "repeated": 0, "skipped": None}
    assert [c["id"] for c in summary["checkpoints"]] == ["c40", "c80"]
    assert summary["save_stall_s"] == {"saves": 2, "median": 0.02, "max": 0.03, "total": 0.04}
    assert sum(summary["time_ledger"].values()) == 19.0
    assert summary["wall_s"] == 11.0
    json.dumps(summary, allow_nan=False)


def test_a_journal_with_nothing_in_it() -> None:
    summary = summarize([])
    assert summary["status"] == "unknown"
    assert summary["steps"] is None
    assert summary["samples"] == {"seen": None, "missing": None, "repeated": None, "skipped": None}
    assert report(summary) == ["run ? is unknown"]


def test_every_prefix_of_a_journal_can_be_summed_up_and_reported() -> None:
    records = journal()
    for length in range(len(records)):
        json.dumps(summarize(records[:length]), allow_nan=False)
        assert report(summarize(records[:length]))


def test_an_attempt_that_ends_at_once_reads_well() -> None:
    """A resume that is stopped before its first step, and an incident after which nothing trained any more."""
    records = [
        {"type": "run", "run_id": "r1", "status": "running", "time": 1.0},
        {"type": "generation", "number": 1, "world_size": 2, "first_step": 1, "last_step": 30, "time": 2.0},
        {"type": "generation", "number": 2, "world_size": 2, "first_step": 31, "last_step": 30, "time": 3.0},
        {"type": "generation", "number": 3, "world_size": 2, "first_step": 31, "time": 3.5},
        {"type": "incident", "id": 1, "kind": "worker-lost", "world_size": 2, "next_world_size": None, "time": 4.0},
        {"type": "run", "status": "integrity", "time": 5.0},
    ]
    summary = summarize(records)
    lines = "\n".join(report(summary))
    assert "run r1 ended without an intact state to resume from" in lines
    assert ["2 -> end" in lines, "None" in lines, "31 to 30" in lines] == [True, False, False]
    steps = [line.split()[2:] for line in report(summary) if line[:1] in ("1", "2", "3")]
    assert steps == [["1", "to", "30"], ["none"], ["from", "31"]]
    document = page(records)
    assert "None" not in document
    assert "31 to 30" not in document


def test_what_json_has_no_number_for_is_left_out() -> None:
    summary = summarize([{"type": "run", "status": "finished", "loss": float("nan")}])
    assert summary["final_loss"] is None


def test_an_incident_written_twice_is_one() -> None:
    records = [*journal(), {"type": "incident", "id": 1, "times": INCIDENT.times, "steps_repeated": 2}]
    (incident,) = summarize(records)["incidents"]
    assert (incident["kind"], incident["steps_repeated"]) == ("node-lost", 2)


def test_a_flat_ledger_is_read_too() -> None:
    records = [{"type": "ledger", "seq": 1, "time": 3.0, "incarnation": 1, "productive": 2.0}]
    assert summarize(records)["time_ledger"] == {"productive": 2.0}


def test_a_ledger_of_an_earlier_version_has_todays_names() -> None:
    records = [{"type": "ledger", "seq": 1, "time": 3.0, "incarnation": 1, "seconds": {"prove": 0.5, "restore": 2.0}}]
    assert summarize(records)["time_ledger"] == {"verify": 0.5, "restore": 2.0}


def test_a_resumed_run_keeps_the_incidents_and_the_time_of_every_attempt() -> None:
    again = [{**record, "time": record["time"] + 50.0} for record in journal()]
    summary = summarize([*journal(), *again])
    assert [incident["id"] for incident in summary["incidents"]] == [1, 1]
    assert summary["time_ledger"] == {"productive": 30.0, "detect": 0.5, "restore": 7.5, "paused": 39.0}
    assert summary["attempts"] == 2


def test_the_last_step_speaks_for_a_run_that_cannot() -> None:
    steps = [{"step": 6, "loss": 2.0}, {"step": 7, "loss": 1.5}]
    summary = summarize([{"type": "run", "status": "running"}, {"type": "steps", "steps": steps}])
    assert (summary["steps"], summary["final_loss"], summary["status"]) == (7, 1.5, "running")


def test_a_generation_that_was_cut_short_ends_with_its_last_finished_step() -> None:
    records = [
        {"type": "generation", "number": 1, "world_size": 4, "first_step": 1},
        {"type": "steps", "steps": [{"step": 1, "generation": 1}, {"step": 2, "generation": 1}]},
        {"type": "generation", "number": 2, "world_size": 3, "first_step": 3},
    ]
    assert [g["last_step"] for g in summarize(records)["generations"]] == [2, None]


def test_an_incident_is_timed_from_the_fault_that_was_injected() -> None:
    faults = [
        {"fault": "kill-node@step=40", "node": "node-3", "at": 109.5},
        {"fault": "add-node@step=80", "node": "node-3", "at": 140.0},
    ]
    summary = with_faults(summarize(journal()), faults)
    (incident,) = summary["incidents"]
    assert incident["fault"] == "kill-node@step=40"
    assert incident["seconds_from_fault"]["detected"] == 0.75
    assert incident["seconds_from_fault"]["first_step"] == 2.5
    assert "0.75 s" in "\n".join(report(summary))
    assert summary["faults"] == faults
    # Training does without the control store: a node that is lost while it is away has a cause of its own.
    before = [{"fault": "kill-control-store@step=30", "node": "node-0", "at": faults[0]["at"] - 0.01}, *faults]
    assert with_faults(summarize(journal()), before)["incidents"] == summary["incidents"]
    later = with_faults(summarize(journal()), faults[1:])
    assert "fault" not in later["incidents"][0]


def test_lost_in_words() -> None:
    assert lost({"lost_workers": [1, 3]}) == "workers 1, 3"
    assert lost({"lost": "node x"}) == "node x"
    assert lost({}) == ""


def test_the_report_names_times_and_source() -> None:
    lines = report(summarize(journal()))
    text = "\n".join(lines)
    assert lines[0] == "run r1 is finished, 100 steps, loss 2.5000, 11.0 s, 2400 samples seen, 0 missing, 0 repeated"
    assert "node-lost  node abcdef01 (worker 2)  10.0 s  41    4 -> 3" in text
    assert "training waited 0.02 s per save (median), 0.03 s at most" in text
    assert "time: productive 15.0 s (79%), restore 3.75 s (20%), detect 0.25 s (1%)" in text


def test_an_incident_says_how_many_bytes_crossed_the_network() -> None:
    """Journals of earlier releases do not know."""
    moved = {"own_node": 8_300_000, "network": 0, "storage": 0}
    stored = {"own_node": 0, "network": 0, "storage": 12_000}
    last = dict(next(record for record in journal() if record["type"] == "incident"))
    told = ("memory (8.3 MB of the readers' nodes, 0 B over the network)", "storage (12.0 kB)")
    for source, places, text in (("memory", moved, told[0]), ("storage", stored, told[1]), ("memory", None, "memory")):
        restore = {"restore": {"bytes_from": places}} if places else {}
        records = [{**last, "source": source, **restore}]
        assert report(summarize(records))[-1].endswith(f"1 step    {text}")
        assert story(records)[0].sentence.endswith(f"; state from {text}")
        assert f"<td>{escape(text)}</td>" in page(records)


def test_durations_and_sizes() -> None:
    assert [duration(x) for x in (None, 0.414, 12.34, 185, 7620)] == [
        "-",
        "0.41 s",
        "12.3 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
    assert [size(x) for x in (None, 12, 12_300, 4e9, 5e12)] == ["-", "12 B", "12.3 kB", "4.0 GB", "5.0 TB"]


def test_nodes_that_are_not_as_fast_as_the_others_are_named() -> None:
    def judged(node: str, state: str, *reasons: str) -> dict[str, object]:
        data = {"node": node, "state": state, "reasons": list(reasons)}
        return {"type": "decision", "kind": "calibration", "time": 1.0, "sentence": "...", "data": data}

    failed = {"type": "decision", "kind": "calibration", "time": 1.0, "sentence": "...", "data": {"node": "c"}}
    records = [judged("a", "slow", "gemm 3 times"), judged("b", "healthy"), failed, judged("a", "slow", "disk 2 times")]
    summary = summarize(records)
    assert summary["calibration"]["a"] == {"state": "slow", "reasons": ["disk 2 times"]}
    assert [line for line in report(summary) if line.startswith("node")] == ["node a is slow: disk 2 times"]

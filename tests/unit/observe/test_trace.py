"""A run as trace events: what Perfetto reads, in order and in microseconds."""

from __future__ import annotations

import json

from sample_journal import journal

from elastic.observe.trace import trace

STEPS = {
    "type": "steps", "seq": 50, "incarnation": 1, "time": 105.0,
    "steps": [{"step": 7, "generation": 1, "loss": 2.5, "time": 104.0, "duration_s": 0.5, "samples": 24}],
}  # fmt: skip


def test_steps_and_phases_are_spans_from_the_first_record_on() -> None:
    events = json.loads(json.dumps(trace([*journal(), STEPS])))["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    # The journal begins at 100 s; the step ended at 104 s after half a second.
    assert (spans["step 7"]["ts"], spans["step 7"]["dur"]) == (3_500_000, 500_000)
    assert (spans["detect"]["ts"], spans["detect"]["dur"]) == (10_000_000, 250_000)
    assert (spans["node-lost"]["ts"], spans["node-lost"]["dur"]) == (10_000_000, 2_000_000)
    assert spans["node-lost"]["args"]["evidence"] == "no heartbeat for 1.5 s"


def test_every_event_has_what_the_format_asks_for() -> None:
    for event in trace([*journal(), STEPS])["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0


def test_an_incident_that_was_told_twice_is_one() -> None:
    (told,) = [record for record in journal() if record["type"] == "incident"]
    events = trace([told, {**told, "times": {**told["times"], "caught_up": 113.0}}])["traceEvents"]
    assert [event["name"] for event in events].count("node-lost") == 1
    assert "repeat steps" in {event["name"] for event in events}


def test_no_records_give_an_empty_trace() -> None:
    assert [event for event in trace([])["traceEvents"] if event["ph"] != "M"] == []

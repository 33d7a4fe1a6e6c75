"""The journal's form of events."""

from __future__ import annotations

import json

import pytest

from elastic.core import events as ev


@pytest.mark.parametrize(
    ("record", "event"),
    [
        ({"event": "HoldAnswered", "generation": 3, "worker": 1, "step": 7}, ev.StopPromised(3, 1, 7)),
        (
            {"event": "MemorySurveyed", "survey": 2, "snapshots": [["memory:a", 5]], "unreachable": [], "missing": []},
            ev.SnapshotsReported(2, (("memory:a", 5),)),
        ),
    ],
)
def test_events_under_their_old_names_are_read(record: dict[str, object], event: ev.Event) -> None:
    assert ev.from_json(json.loads(json.dumps(record))) == event
    assert ev.to_json(event)["event"] == type(event).__name__


def test_an_unknown_event_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="NoSuchEvent"):
        ev.from_json({"event": "NoSuchEvent"})

"""How long somebody may be silent, by what the run is doing and how beats come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core import events as ev
from elastic.core.fleet import Slot, SlotPhase, Slots
from elastic.core.run.phase import Ending, Waiting
from elastic.core.settings import FailureSettings
from elastic.runtime.controller.senses.heartbeat_table import HeartbeatTable
from elastic.runtime.messages import Beat

NODES = 3


def silent_after(phase: Any, per_relay: int) -> float:
    """How long after its last beat a node is told to be silent; the others beat all the time."""
    failures = FailureSettings(heartbeat_s=0.2, suspect_after_s=1.0, probe_timeout_s=0.5, nodes_per_relay=per_relay)
    slots = Slots({number: Slot(number, SlotPhase.PLACED, 0.0, node=f"n{number}") for number in range(NODES)})
    fleet = SimpleNamespace(slots=slots, workers=dict.fromkeys(range(NODES)))
    state: Any = SimpleNamespace(phase=phase, fleet=fleet, generation=1)
    telemetry: Any = SimpleNamespace(
        watch=SimpleNamespace(check=lambda *_: None), step=0, flush=lambda now: None
    )  # fmt: skip
    told: list[ev.Event] = []
    table = HeartbeatTable(failures, lambda: state, telemetry, told.append, lambda: 0.0)
    for number in range(100):
        now = number / 20
        for node in range(NODES):
            if node or number == 0:
                assert table.beat(Beat(f"n{node}", {node: 0.0}), now)
        table.look(now)
        if told:
            (silence,) = told
            assert isinstance(silence, ev.WorkersSilent)
            assert silence.nodes == ("n0",)
            return now
    raise AssertionError("nobody is silent")


@pytest.mark.parametrize(
    ("phase", "per_relay", "limit_s"),
    [
        (Waiting(0.0, ""), 2, 1.0),
        # Nobody is probed then.
        (Ending(0.0, 9.0), 0, 0.7),
        (Ending(0.0, 9.0), NODES, 0.7),
        # A relay that is lost takes a moment of its nodes' beats along.
        (Ending(0.0, 9.0), 2, 1.0),
    ],
)
def test_a_node_is_silent_after_a_time(phase: Any, per_relay: int, limit_s: float) -> None:
    assert silent_after(phase, per_relay) == pytest.approx(limit_s + 0.05)

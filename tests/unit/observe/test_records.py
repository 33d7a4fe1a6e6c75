"""The journal's records: their JSON is a format that runs outlive, so it is written out here in full."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sample_journal import INCIDENT

from elastic.core import events as ev
from elastic.core.data.sample_ledger import SampleCount
from elastic.core.data.steps import CompletedStep
from elastic.observe import records
from elastic.observe.summary import summarize

STEP = CompletedStep(
    2, 7, True, float("nan"), ((0, 4),), 4, 0.5, 0.1, 0.2, 9, float("inf"), (0.1,), "the loss is nan", ((4, 8),),
    (0.3,), 0.0, {"x": 1.5}, {"x": {0: 1.0, 1: 2.0}}, 255, gradient_parts=(3.0, float("inf")), sample_flops=1312.0,
    energy_j=2.00049, audit="agreed",
)  # fmt: skip
RESTORES = [
    {"rank": rank, "generation": 2, "checkpoint": "c", "source": "memory", "step": 6, "bytes_read": 10,
     "bytes_from": {"own_node": 7, "network": 3 - rank, "storage": rank},
     "bytes_needed": 9, "read_s": 0.1 * rank, "install_s": 0.2, "verify_s": 0.3,
     "kept": 4, "again": "a reason" if rank else ""}
    for rank in (0, 1)
]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (records.begin({1: 3}), {"type": "begin", "read": {"1": 3}}),
        (records.run_began("r", 2), {"type": "run", "status": "running", "run_id": "r", "attempt": 2}),
        (records.run_ended("r", {"status": "finished"}), {"type": "run", "run_id": "r", "status": "finished"}),
        (
            records.event(ev.SlotPlaced(3, "n"), 4.0, 7),
            {"type": "event", "now": 4.0, "number": 7, "event": "SlotPlaced", "slot": 3, "node": "n"},
        ),
        (
            records.decision("start", "go", step=1, generation=2, world_size=3, data={"a": 1}),
            {"type": "decision", "kind": "start", "sentence": "go", "step": 1, "generation": 2, "world_size": 3,
             "data": {"a": 1}},
        ),
        (
            records.generation_began(2, 4, 8, 5.0, [(1, 2)], {"dp": 2, "tp": 2}),
            {"type": "generation", "number": 2, "world_size": 4, "first_step": 8, "now": 5.0, "skips": [[1, 2]],
             "mesh": {"dp": 2, "tp": 2}},
        ),
        (records.generation_ended(2, 9), {"type": "generation", "number": 2, "last_step": 9}),
        (
            records.steps([records.step(STEP, 1.23456)]),
            {"type": "steps", "steps": [
                {"step": 7, "generation": 2, "loss": None, "time": 1.235, "duration_s": 0.5, "data_wait_s": 0.1,
                 "save_stall_s": 0.2, "straggler_s": 0.0, "samples": 4, "positions": [[0, 4]], "grad_norm": None,
                 "learning_rates": [0.1], "metrics": {"x": 1.5}, "metrics_by_rank": {"x": {"0": 1.0, "1": 2.0}},
                 "anomaly": "the loss is nan", "skipped": [[4, 8]], "content": "00000000000000ff",
                 "gradient_parts": [3.0, None], "sample_flops": 1312.0, "energy_j": 2.0,
                 "audit": "agreed"}]},
        ),
        (
            records.restore(RESTORES),
            {"type": "restore", "generation": 2, "checkpoint": "c", "source": "memory", "step": 6, "bytes_read": 20,
             "bytes_from": {"own_node": 14, "network": 5, "storage": 1}, "bytes_needed": 18,
             "read_s": 0.1, "install_s": 0.2, "verify_s": 0.3, "kept": 8,
             "again": ["a reason"]},
        ),
        (
            records.checkpoint("c", 7, 100, 0.123456, 0.5),
            {"type": "checkpoint", "id": "c", "step": 7, "bytes": 100, "seconds": 0.1235, "stall_s": 0.5},
        ),
        (
            records.samples(SampleCount(5, 1, 2, skipped=3)),
            {"type": "samples", "seen": 5, "missing": 1, "repeated": 2, "skipped": 3},
        ),
        (
            records.ledger({"productive": 1.0}, 2.0, {"productive": 3.0}),
            {"type": "ledger", "seconds": {"productive": 1.0}, "wall_s": 2.0, "held_s": {"productive": 3.0}},
        ),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_written_form_of_each_type(made: Any, written: Any) -> None:
    assert json.loads(json.dumps(made, allow_nan=False)) == written


def test_an_incident_tells_who_noticed_it_and_what_was_restored() -> None:
    made = records.incident("r", "node heartbeats", INCIDENT, records.restore(RESTORES))
    assert (made["type"], made["run"], made["detector"], made["id"]) == ("incident", "r", "node heartbeats", 1)
    places = {"own_node": 14, "network": 5, "storage": 1}
    assert made["restore"] == {
        "bytes_read": 20, "bytes_from": places, "bytes_needed": 18, "read_s": 0.1, "install_s": 0.2, "verify_s": 0.3,
    }  # fmt: skip
    (shown,) = summarize([made])["incidents"]
    assert (shown["kind"], shown["bytes_from"]) == ("node-lost", places)

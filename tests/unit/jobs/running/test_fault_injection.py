"""Faults by step."""

from __future__ import annotations

from cli_fakes import Display, FakeCluster
from elastic_jobs.running.fault_injection import Faults, parse_faults
from elastic_jobs.running.handle import FakeHandle

WORKERS = [
    {"rank": 0, "node": "00", "pid": 100},
    {"rank": 1, "node": "01", "pid": 101},
    {"rank": None, "node": "02", "pid": 102},
]


def test_faults_are_injected_in_order_by_step_where_the_run_is() -> None:
    cluster, handle, display = FakeCluster(), FakeHandle(), Display()
    handle.advance(step=9, workers=WORKERS, controller_pid=7)
    text = "add-node@step=4,kill-node@step=2,kill-worker:1@step=5,kill-controller@step=6,thaw-node@step=7"
    thread = Faults(parse_faults(text), cluster, handle)
    thread._run(display)
    # The last node carries no rank, so the one before it is struck.
    assert cluster.log == ["kill-node node-1", "add-node None", "kill-worker 101", "kill-worker 7"]
    assert display.notes[-1] == "could not inject thaw-node@step=7: no node is frozen"


def test_faults_that_are_not_reached_are_left() -> None:
    handle = FakeHandle()
    handle.advance(step=3, workers=WORKERS)
    handle.end("finished")
    thread = Faults(parse_faults("kill-node@step=2,add-node@step=4"), FakeCluster(), handle)
    thread._run(Display())
    assert str(thread._plan) == "add-node@step=4"

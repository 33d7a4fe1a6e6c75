"""A short run that is interrupted: its events, the journal that a controller wrote of it, and its step reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.core.run import machine
from elastic.core.settings import RunSettings, ScalingSettings
from elastic.observe.journal import JournalWriter
from elastic.runtime.controller.telemetry import Telemetry

SETTINGS = RunSettings("run", scaling=ScalingSettings(1, 2), max_steps=10)

# (now, event): a run of two workers whose second one dies in step 4.
EVENTS: tuple[tuple[float, ev.Event], ...] = (
    (0.0, ev.RunStarted()),
    (1.0, ev.SlotPlaced(0, "node-a")),
    (1.0, ev.SlotPlaced(1, "node-b")),
    (2.0, ev.WorkerReady(0, 100, "a")),
    (2.0, ev.WorkerReady(1, 101, "b")),
    (3.0, ev.GroupJoined(1, 0)),
    (3.0, ev.GroupJoined(1, 1)),
    (4.0, ev.TrainingReached(1, 0, 0)),
    (4.0, ev.TrainingReached(1, 1, 0)),
    (5.0, ev.FirstStepDone(1, 1)),
    (6.5, ev.CheckpointCommitted("step-00000002-g0001", 2, 1)),
    (8.0, ev.WorkerDied(1, "killed")),
    (8.1, ev.WorkerLeft(1, 0, 3)),
)


def live(events: Sequence[tuple[float, ev.Event]]) -> Any:
    state = machine.initial(SETTINGS, 0.0)
    for now, event in events:
        state, _ = machine.step(state, event, now)
    return state


def journal(url: Path) -> JournalWriter:
    """What a controller would have written for EVENTS, with three steps of four samples each."""
    writer = JournalWriter(str(url), "run")
    telemetry = Telemetry(SETTINGS, 0.0, lambda record: writer.append(record) and None)
    for now, event in EVENTS:
        writer.append({"type": "event", "now": now, **ev.to_json(event)})
        if isinstance(event, ev.WorkerReady) and event.worker == 1:
            telemetry.generation_begins(1, 2, 0, now)
        if isinstance(event, ev.TrainingReached) and event.worker == 1:
            for step in (1, 2, 3):
                for rank in (0, 1):
                    telemetry.report(step_report(step, rank), 4.0 + step)
            telemetry.flush(7.0, force=True)
    return writer


def step_report(step: int, rank: int, **more: Any) -> StepReport:
    start = 4 * (step - 1) + 2 * rank
    return StepReport(step, 0.5 / step, ((start, start + 2),), 2, 0.5, generation=1, rank=rank, **more)

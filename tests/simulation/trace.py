"""A real failure history as a plan: `tests/data/infinitehbd`, with days as seconds."""

from __future__ import annotations

import json
from pathlib import Path

from elastic.core.settings import FailureSettings, RunSettings, ScalingSettings
from simulation.faults import Fault, Plan

_FAULTS = Path(__file__).parent.parent / "data" / "infinitehbd" / "faults.json"

# About one fault in eight stops a server silently (Meta, Llama 3: 12 % silent).
_SILENT = 8


def plan(first_day: float, last_day: float, slots: int, low: int, seconds_per_day: float) -> Plan:
    """A run on `slots` servers of one worker each, over these days of the trace."""
    rows = [row for row in json.loads(_FAULTS.read_text()) if first_day <= row[1] < last_day]
    numbers = {server: number for number, server in enumerate(dict.fromkeys(row[0] for row in rows))}
    faults = tuple(
        Fault(
            "freeze_server" if count % _SILENT == 0 else "lose_server",
            (start - first_day) * seconds_per_day,
            numbers[server],
            (end - start) * seconds_per_day,
        )
        for count, (server, start, end, _) in enumerate(rows)
        if numbers[server] < slots
    )
    horizon = (last_day - first_day) * seconds_per_day
    failures = FailureSettings(hang_floor_s=30.0, join_timeout_s=60.0, worker_start_timeout_s=30.0, startup_retries=5)
    settings = RunSettings("trace", scaling=ScalingSettings(low, slots, gather_s=5.0), failures=failures)
    return Plan(
        settings, faults, nodes=slots, max_steps=int(horizon / 8), step_s=5.0, save_every=20, liveness=True,
        horizon_s=horizon,
    )  # fmt: skip

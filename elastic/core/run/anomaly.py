"""The record of one anomaly (a step whose loss or gradient was no number), and what follows from it for what was saved.

Pure questions to the state; what is done about an anomaly is in `anomalies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.core.run.state import RunState


@dataclass(frozen=True)
class Anomaly:
    """Found in `generation` by the step that came after `step` finished ones; `evidence` says where and what.

    `undone`: the run went back, so that nothing beyond `step` of that generation, or of one before it, counts any more.
    """

    generation: int
    step: int
    evidence: str
    undone: bool


def counts(state: RunState, generation: int, step: int) -> bool:
    """False for a state (checkpoint or snapshot) that lies behind an anomaly: its step was done again with other
    samples, and what comes late from the abandoned timeline must never be begun from."""
    return not any(a.undone and generation <= a.generation and step > a.step for a in state.anomalies)


def reason_to_end(state: RunState) -> str | None:
    """Why the run ends with the anomaly that was found in this generation; None where it can go on."""
    last = state.anomalies[-1] if state.anomalies else None
    if last is None or last.generation != state.generation:
        return None
    settings = state.settings.anomalies
    if settings.policy == "stop":
        return f"{last.evidence}; the policy is to stop"
    recent = sum(a.step > last.step - settings.window_steps for a in state.anomalies)
    if recent > settings.max_anomalies:
        return (
            f"{recent} anomalies within {settings.window_steps} steps (at most {settings.max_anomalies} are "
            f"dealt with); the last one: {last.evidence}"
        )
    return None

"""What telemetry says of a run that continues: rates are per what was really counted."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.data.steps import StepReport
from elastic.core.settings import RunSettings
from elastic.runtime.controller.telemetry import Telemetry


def after_steps(count: int, tokens: int) -> Telemetry:
    """One rank, a step of 4 samples every half second."""
    telemetry = Telemetry(RunSettings("r"), 100.0, lambda record: None)
    telemetry.generation_begins(1, 1, 0, 100.0)
    for step in range(1, count + 1):
        report = StepReport(
            step, 2.0, ((4 * step - 4, 4 * step),), 4, 0.5, grad_norm=1.5, learning_rates=(0.1, 0.2), tokens=tokens,
            generation=1,
        )  # fmt: skip
        telemetry.report(report, 100.0 + step / 2)
    return telemetry


@pytest.mark.parametrize(
    ("tokens", "counted"), [(64, {"tokens_per_s": 128.0}), (0, {"samples_per_s": 8.0})], ids=["tokens", "samples"]
)
def test_samples_are_not_called_tokens(tokens: int, counted: dict[str, float]) -> None:
    telemetry = after_steps(5, tokens)
    assert telemetry.rates() == {"steps_per_s": 2.0, **counted}
    assert (telemetry.learning_rate, telemetry.grad_norm) == (0.1, 1.5)


@pytest.mark.parametrize("steps", [0, 1])
def test_there_is_no_rate_before_two_steps(steps: int) -> None:
    assert after_steps(steps, 64).rates() == {}


def test_repeated_steps_must_read_what_was_read_before() -> None:
    written: list[Any] = []
    telemetry = Telemetry(RunSettings("r"), 100.0, written.append)
    telemetry.generation_begins(1, 2, 0, 100.0)
    for step in (1, 2):
        for rank in (0, 1):
            positions = ((4 * step - 4 + 2 * rank, 4 * step - 2 + 2 * rank),)
            content = 2**63 + step + rank
            telemetry.report(StepReport(step, 2.0, positions, 2, 0.5, content=content, generation=1, rank=rank), 101.0)
    # A lost worker's last step, from what was stored with a snapshot.
    stored = StepReport(3, 2.0, ((8, 12),), 4, 0.5, content=10, generation=2).to_json()
    telemetry.recovered(2, 1, {0: [stored]}, 104.0)
    assert telemetry.contents.after(1) == {4: 5, 8: 10}
    assert telemetry.contents.after(2) == {8: 10}
    again = Telemetry(RunSettings("r"), 100.0, lambda record: None)
    again.replay_samples(written)
    assert again.contents.after(0) == {0: 3, 4: 5, 8: 10}

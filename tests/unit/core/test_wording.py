"""Sentences agree with the numbers in them."""

from __future__ import annotations

import pytest

from elastic.core.policy.scaling import ScalingFacts
from elastic.core.policy.scaling_policies import policy_named
from elastic.core.settings import ScalingSettings
from elastic.core.wording import plural, verb


def test_plural() -> None:
    assert [plural(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [verb(count, "waits", "wait") for count in (0, 1, 2)] == ["wait", "waits", "wait"]


def facts(idle: int, arriving: int = 0, **more: object) -> ScalingFacts:
    settings = ScalingSettings(min_workers=2, max_workers=6)
    known: dict[str, object] = {"now": 1.0, "idle": idle, "arriving": arriving, "pending_slots": 0, "members": 2}
    return ScalingFacts(settings=settings, **{**known, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (facts(1), "1 new worker is ready: 2 -> 3"),
        (facts(2), "2 new workers are ready: 2 -> 4"),
        (facts(1, 1), "1 new worker ready; 1 more is starting"),
        (facts(2, 2), "2 new workers ready; 2 more are starting"),
        (facts(1, storage_failing=True), "1 new worker waits: growing needs a checkpoint and storage is failing"),
    ],
)
def test_growing(given: ScalingFacts, sentence: str) -> None:
    """Seen: "1 new workers are ready"."""
    assert policy_named("eager").grow(given).reason == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (facts(1, pending_slots=1), "waiting for 1 more worker: 1 of at least 2 ready, 0 starting, 1 slot pending"),
        (facts(0, 1), "waiting for 2 more workers: 0 of at least 2 ready, 1 starting, 0 slots pending"),
        (facts(2, 1, first_start=True), "2 of 6 workers ready; 1 more is starting"),
    ],
)
def test_starting(given: ScalingFacts, sentence: str) -> None:
    assert policy_named("eager").start(given).reason == sentence

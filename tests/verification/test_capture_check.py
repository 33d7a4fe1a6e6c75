"""What is copied is compared with the live engine: what is wrong is not handed over, and the generation ends.

The bugs themselves are mutations of the corpus (S1 to S11).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.core.errors import CollectiveFailed, IntegrityError
from elastic.core.generation_spec import GenerationSpec, MemoryPlan
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.state import capture_check
from verification import bugs_capture as bugs
from verification import scene
from verification.corpus import Z0, Z1, Z2, Z3
from verification.model import Setup, steps_done
from verification.test_replicas import Coordinator, Memory

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

STEP = steps_done(scene.SAVED, 0)


def take(state: Any, step: int, caller_step: int) -> None:
    state.snapshot(run_id="run", generation=1, step=step, caller={"step": caller_step})


def on_rank_0(setup: Setup, work: Callable[[Any, Any], None]) -> Exception | None:
    with scene.world(setup, 1, scene.SAVED) as world:
        return world.run(lambda engine, _: work(engine, scene.open_state(engine)))[0]  # type: ignore[no-any-return]


def test_the_callers_step_is_the_snapshots() -> None:
    error = on_rank_0(Z1, lambda _, state: take(state, STEP, STEP - 1))
    assert isinstance(error, IntegrityError)
    assert f"the caller's step {STEP - 1}" in str(error)
    assert f"step {STEP}" in str(error)


def test_the_engine_counts_the_steps_of_the_run() -> None:
    def work(engine: Any, state: Any) -> None:
        take(state, STEP, STEP)
        engine.global_steps += 1
        take(state, STEP + 1, STEP + 1)
        # A step of the run that the engine has not made.
        take(state, STEP + 2, STEP + 2)

    error = on_rank_0(Z1, work)
    assert isinstance(error, IntegrityError)
    assert f"the engine's count of {STEP + 1} steps, not {STEP + 2}" in str(error)


@pytest.mark.parametrize("setup", [Z0, Z2, Z3], ids=str)
def test_samples_take_turns(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """Every tensor of a snapshot is looked at, a few at a time, after the first one was looked at whole."""
    seen: list[set[tuple[str, str]]] = []
    look = capture_check.CaptureCheck.compare

    def compare(self: Any) -> None:
        seen.append(set(self.found))
        look(self)

    monkeypatch.setattr(capture_check, "SAMPLE_BYTES", 256)
    monkeypatch.setattr(capture_check.CaptureCheck, "compare", compare)

    def work(engine: Any, state: Any) -> None:
        for _ in range(40):
            take(state, STEP, STEP)

    assert on_rank_0(setup, work) is None
    assert len(seen[0]) > 20, "whole"
    assert all(len(some) < len(seen[0]) for some in seen[1:])
    assert set.union(*seen[1:]) == seen[0]


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "storage"])
def test_a_wrong_copy_is_not_handed_over_and_ends_the_generation(memory: bool) -> None:
    coordinator = Coordinator(Memory() if memory else None)

    def work(engine: Any, state: Any) -> None:
        plan = MemoryPlan(every_steps=1) if memory else None
        spec = GenerationSpec("run", 1, 0, 1, memory=plan, checkpoint_every_steps=None if memory else 1)
        scope = GenerationScope(spec, coordinator, torch.device("cpu"))
        snapshots = Snapshots(scope, state, dict)
        try:
            with bugs.swapped()():
                scope.step = STEP
                snapshots.prepare(0.1, True)
                snapshots.start()
                snapshots.drain()
            snapshots.before_update()
        finally:
            snapshots.close()

    error = on_rank_0(Z2, work)
    assert isinstance(error, CollectiveFailed)
    assert "exp_avg" in str(error)
    assert coordinator.saved == []
    assert not memory or coordinator.memory().committed == []

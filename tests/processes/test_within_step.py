"""A rank is lost within a step: survivors keep what they have computed of it; the oracle is the undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Outcome
from test_oracle import CEILING, FLOOR, MARGIN, Run, _distance
from within_step import PER_RANK, WORLD

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

AT, STEPS, VICTIM = 1, 3, 1
MORE: dict[str, Any] = {"batch": BatchSettings(max_steps=STEPS), "max_world_size": WORLD, "checkpoint_every_steps": 1}
WHOLE = WORLD * PER_RANK
KEYS = {"contiguous_gradients": False, "round_robin_gradients": True}
FP32_SUMS = {"top": {"data_types": {"grad_accum_dtype": "fp32"}}}
KEPT = [
    pytest.param({"stage": 0}, id="stage0"),
    pytest.param({"stage": 1}, id="stage1"),
    pytest.param({"stage": 0, "dtype": "bf16"}, id="stage0-bf16"),
    pytest.param({"stage": 1, "dtype": "bf16"}, id="stage1-bf16"),
    pytest.param({"stage": 1, "dtype": "bf16", **FP32_SUMS}, id="stage1-bf16-fp32-sums"),
    pytest.param(
        {"stage": 1, "zero": {"contiguous_gradients": False, "round_robin_gradients": True}}, id="stage1-keys"
    ),
    pytest.param({"stage": 1, "num_workers": 1, "clears": True}, id="stage1-workers-clears"),
]


@pytest.mark.parametrize("config", KEPT)
def test_a_kill_at_the_last_micro_batch_costs_the_share_of_the_lost_rank(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """The others have finished theirs and wait in the reduction."""
    where = "forward" if config["stage"] else "backward"
    lost, shrunk = disturbed(crew, tmp_path / "moved", config, {VICTIM: (where, PER_RANK)})
    assert computed(shrunk, 3) == PER_RANK
    assert [outcome.restores[-1].kept for outcome in shrunk] == [PER_RANK] * 3
    assert all(outcome.restores[-1].again == "" for outcome in shrunk)
    assert all(outcome.told["abandoned"] == 1 for outcome in shrunk)
    judge(crew, tmp_path, config, [lost, shrunk])


@pytest.mark.parametrize("config", KEPT[:2])
def test_survivors_that_are_stopped_between_micro_batches_keep_those(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    ranks = {VICTIM: ("forward", 3), 0: ("between", 9), 2: ("between", 10), 3: ("between", 16)}
    lost, shrunk = disturbed(crew, tmp_path / "moved", config, ranks)
    assert [outcome.restores[-1].kept for outcome in shrunk] == [8, 9, 15]
    assert computed(shrunk, 3) == WHOLE - 32
    judge(crew, tmp_path, config, [lost, shrunk])


@pytest.mark.parametrize("config", KEPT[:2])
def test_a_rank_in_the_middle_of_a_backward_gives_up_its_own_share(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    ranks = {VICTIM: ("forward", PER_RANK), 2: ("within", 5)}
    lost, shrunk = disturbed(crew, tmp_path / "moved", config, ranks)
    assert [outcome.restores[-1].kept for outcome in shrunk] == [PER_RANK, 0, PER_RANK]
    assert shrunk[1].restores[-1].again == "its backward pass was under way"
    assert computed(shrunk, 3) == 2 * PER_RANK
    judge(crew, tmp_path, config, [lost, shrunk])


@pytest.mark.parametrize("config", KEPT[:2])
def test_a_rank_whose_loop_has_kept_something_of_its_micro_batches_gives_up_its_own_share(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """What it has kept is restored as it was before the step. Seen: what whole micro-batches had added was lost."""
    config = {**config, "counts_batches": True}
    lost, shrunk = disturbed(crew, tmp_path / "moved", config, {VICTIM: ("forward", PER_RANK)})
    assert [outcome.restores[-1].kept for outcome in shrunk] == [0, PER_RANK, PER_RANK]
    assert shrunk[0].restores[-1].again.startswith("elastic.state['seen'] is not what was restored")
    assert computed(shrunk, 3) == 2 * PER_RANK
    # In the first step, its share of the second as dealt again, and a third of the last, padding counted.
    assert shrunk[0].told["seen"] == PER_RANK + -(-2 * PER_RANK // 3) + -(-WHOLE // 3)
    judge(crew, tmp_path, config, [lost, shrunk])


REPEATED = [
    ({"stage": 0}, "reduction", "the reduction of the gradients had begun"),
    ({"stage": 1}, "reduction", "the reduction of the gradients had begun"),
    ({"stage": 1}, "step", "the reduction of the gradients had begun"),
    ({"stage": 2}, "backward", "in stage 2 partial sums lie on other ranks"),
    ({"stage": 3}, "backward", "in stage 3 partial sums lie on other ranks"),
    ({"stage": 1, "zero": {"overlap_comm": True}}, "backward", "with overlap_comm they are reduced within the last"),
    ({"stage": 1, "counts": True}, "backward", "'passes' is not what it was: a buffer that forward passes change"),
]


@pytest.mark.parametrize(("config", "where", "why"), REPEATED)
def test_otherwise_the_step_is_done_again_and_the_reason_is_told(
    crew: Crew, tmp_path: Path, config: dict[str, Any], where: str, why: str
) -> None:
    lost, shrunk = disturbed(crew, tmp_path / "moved", config, {VICTIM: (where, PER_RANK)})
    assert computed(shrunk, 3) == WHOLE
    assert [outcome.restores[-1].kept for outcome in shrunk] == [0] * 3
    assert all(why in outcome.restores[-1].again for outcome in shrunk)
    judge(crew, tmp_path, config, [lost, shrunk], frozenset({"passes"}))


def test_what_is_kept_outlives_further_losses(crew: Crew, tmp_path: Path) -> None:
    """A newcomer is lost in the rest of the step: before the others have added to what they keep, and after."""
    config: dict[str, Any] = {"stage": 1}
    others = (0, 2, 3)
    faults = [
        {VICTIM: ("forward", PER_RANK)},
        {VICTIM: ("forward", 1), **dict.fromkeys(others, ("between", 1))},
        {VICTIM: ("forward", 4), **dict.fromkeys(others, ("between", 4))},
    ]
    lost, shrunk = disturbed(crew, tmp_path / "moved", config, *faults)
    assert [outcome.restores[-1].kept for outcome in lost] == [PER_RANK] * 3
    assert [outcome.restores[-1].kept for outcome in shrunk] == [PER_RANK + 3] * 3
    assert computed(shrunk, 3) == WHOLE - 3 * (PER_RANK + 3)
    judge(crew, tmp_path, config, [lost, shrunk])


def disturbed(
    crew: Crew, url: Path, config: dict[str, Any], *faults: dict[int, tuple[str, int]]
) -> tuple[list[Outcome], list[Outcome]]:
    """WORLD ranks up to each fault in step AT, in which VICTIM is killed and replaced; then the others to the end."""
    planned = {crew.generation + 1 + number: ranks for number, ranks in enumerate(faults)}
    settings = {**config, "url": str(url), "in_loop": True, "at": AT, "faults": planned}
    survivors = [rank for rank in range(WORLD) if rank != VICTIM]
    checkpoint, ended = None, []
    for ranks in faults:
        crew.begin(range(WORLD), "within_step.train", settings, checkpoint=checkpoint, **MORE)
        for number in ranks:
            crew.reached(number, "there")
        if checkpoint is None:
            crew.reached(0, f"committed step {AT}")
        ended = kill(crew, survivors, ranks)
        checkpoint = CheckpointStore(str(url), "run").list()[0].id
    shrunk = crew.run(survivors, "within_step.train", settings, checkpoint=checkpoint, **MORE)
    for outcome in shrunk:
        assert (outcome.result.kind, outcome.result.step) == ("finished", STEPS), outcome.result.traceback
        assert outcome.told["calls"] == 1
    return ended, shrunk


def kill(crew: Crew, survivors: list[int], ranks: dict[int, tuple[str, int]]) -> list[Outcome]:
    """Kill VICTIM when the others have finished what they can."""
    for number in survivors:
        if ranks.get(number, ("",))[0] != "between":
            crew.in_collective(number)
    crew.members[VICTIM].signal(signal.SIGKILL)
    crew.members[VICTIM].process.join()
    for number in survivors:
        crew.abort(number, f"rank {VICTIM} was lost")
    ended = [crew.outcome(number) for number in survivors]
    crew.replace(VICTIM)
    assert {outcome.result.kind for outcome in ended} <= {"ended", "collective_failed"}
    return ended


def computed(outcomes: list[Outcome], world_size: int) -> int:
    """Micro-batches of step AT that the generation of so many ranks has computed, padding not counted."""
    return sum(outcome.told["passes"][world_size, AT] for outcome in outcomes)


_STILL: dict[str, list[Run]] = {}


def still_runs(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> list[Run]:
    """Undisturbed ones at both world sizes, made once for each configuration."""
    key = repr(sorted(config.items()))
    if key not in _STILL:
        _STILL[key] = []
        for world_size in (WORLD, WORLD - 1):
            url = tmp_path / f"still-{world_size}"
            outcomes = crew.run(range(world_size), "within_step.train", {**config, "url": str(url)}, **MORE)
            _STILL[key].append(Run(url, [outcomes]))
    return _STILL[key]


def judge(
    crew: Crew,
    tmp_path: Path,
    config: dict[str, Any],
    generations: list[list[Outcome]],
    but: frozenset[str] = frozenset(),
) -> None:
    """Losses, weights and optimizer state as in an undisturbed run; every sample once in every step."""
    still, other = still_runs(crew, tmp_path, config)
    moved = Run(tmp_path / "moved", generations)
    for run in (still, other, moved):
        run.state = {name: value for name, value in run.state.items() if not any(part in name for part in but)}
    expected = {name: loss for name, loss in still.losses.items() if int(name.removeprefix("loss ")) > AT}
    found = {name: moved.losses[name] for name in expected}
    noise = max(
        _distance(still.state, other.state),
        _distance(expected, {name: other.losses[name] for name in expected}),
    )
    allowed = min(max(MARGIN * noise, 8 * FLOOR), CEILING[config.get("dtype", "fp32")])
    assert _distance(expected, found) <= allowed
    assert _distance(still.state, moved.state) <= allowed
    for step in range(AT + 1, STEPS + 1):
        parts = [part for outcome in generations[-1] for report in outcome.reports if report.step == step
                 for part in report.positions]  # fmt: skip
        assert sorted(at for start, stop in parts for at in range(start, stop)) == list(
            range((step - 1) * WHOLE, step * WHOLE)
        )
    assert all(torch.isfinite(loss) for loss in found.values())

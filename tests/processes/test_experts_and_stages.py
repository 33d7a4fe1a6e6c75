"""Ranks that have different layers and share the experts of these, also beside layers and sequences, through other
world sizes, other numbers of both and lost ranks; the oracle is one rank with all layers and experts."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import (
    AT,
    LAST_STEP,
    WHOLE,
    Part,
    Run,
    assert_every_sample_once,
    assert_means,
    assert_within_rounding,
    of_run,
)
from crew import Crew
from expert_model import EPS
from test_fsdp2_experts import ALLOWED, EXACT, HALF, SLOWLY
from test_fsdp2_pipeline import CLIPPING, LOOPED, STOP, later
from test_oracle import _assert_ended, _distance, damage_newest

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.settings import AnomalySettings
from elastic.engines.fsdp2.config import WEIGHTS_LATER

pytestmark = pytest.mark.processes
SLOW = pytest.mark.slow
CONFIG: dict[str, Any] = {
    "engine": "fsdp2", "experts": True, "precision": "float64", "eps": EPS, "clipping": CLIPPING,
}  # fmt: skip
# In generations that share neither, too, the experts are those that a run may share.
SIZES = {"ep_sizes": (1, 2)}
BOTH, STAGES, EXPERTS = {"pp": 2, "ep": 2}, {"pp": 2, "ep": 1}, {"pp": 1, "ep": 2}
# Two pipelines of two that share the experts of each stage; one pipeline; two ranks with all layers; one pipeline of
# four; the first on other ranks.
CHANGES: Sequence[Part] = (
    ((0, 1, 2, 3), 2, BOTH), ((3, 1), 3, STAGES), ((2, 0), 5, EXPERTS), ((3, 1, 2, 0), 6, {"pp": 4}),
    ((1, 0, 3, 2), None, BOTH),
)  # fmt: skip


def through(crew: Crew, url: Path, config: dict[str, Any], parts: Sequence[Part], **spec: Any) -> Run:
    spec = {"anomalies": STOP, **spec}
    generations = cells.through(crew, url, "staged.train", config, parts, **SIZES, **spec)
    return Run(url, generations, {**spec, **(parts[-1][2] if len(parts[-1]) == 3 else {})}.get("tp", 1))


def assert_equal(one: Run, moved: Run) -> None:
    """Losses, gradient norms, weights and an evaluation: in fp64 but for the losses, which are fp32."""
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state(one.shapes[0])) <= EXACT
    assert_every_sample_once(moved)
    (outcome,) = one.outcomes
    norms = {report.step: report.grad_norm for report in outcome.reports}
    assert min(norms.values()) > CLIPPING, "gradients were clipped"
    for other in moved.outcomes:
        for report in other.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-6), "of all stages and experts, once"
    for last in (outcome for outcome in moved.outcomes if outcome.result.kind == "finished"):
        assert_means(last, one)
        assert last.told["evaluated"] == pytest.approx(outcome.told["evaluated"], abs=ALLOWED)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"dropout": 0.2, "tied": True}, id="1f1b-tied-dropout"),
        pytest.param({"fsdp2": {"pipeline_schedule": "GPipe", "micro_batch": 4}}, id="gpipe", marks=SLOW),
        pytest.param({**LOOPED, "dropout": 0.2}, id="interleaved"),
        pytest.param({**LOOPED, "fsdp2": {"pipeline_schedule": "LoopedBFS"}}, id="looped", marks=SLOW),
        *[pytest.param({**LOOPED, "fsdp2": later(name)}, id=name, marks=SLOW) for name in WEIGHTS_LATER],
        pytest.param({"dropout": 0.2, "tied": True, "compiled": "blocks"}, id="compiled", marks=SLOW),
        pytest.param({**LOOPED, "dropout": 0.2, "compiled": "model"}, id="interleaved-compiled", marks=SLOW),
    ],
)
def test_experts_of_stages_equal_one_rank_with_all(crew: Crew, tmp_path: Path, way: dict[str, Any]) -> None:
    """The loss that spreads tokens over experts is carried from stage to stage; half of some experts get no token."""
    config = {**CONFIG, **way}
    one = through(crew, tmp_path / "one", {**config, "compiled": "nothing"}, WHOLE)
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, CHANGES)
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert_equal(one, moved)
    places = [outcome.told["coordinates"] for outcome in moved.outcomes[-4:]]
    assert [(place["ep"], place["pp"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    if "blocks" not in way:
        of_four = moved.outcomes[8:12]
        assert [any(".experts." in name for name in each.told["names"]) for each in of_four] == [
            False,
            True,
            True,
            False,
        ]
    uses = [
        {(use.op, use.axis) for use in report.collectives} for report in moved.outcomes[0].reports if report.step == 2
    ]
    assert all(("all_to_all_single", "ep") in use and ("reduce_scatter_tensor", "dp") in use for use in uses)


def assert_exported(folder: Path, run: Run, shapes: Any) -> None:
    made = torch.load(elastic.export(folder / "run", folder / "out", to="torch") / "model.pt")
    for key, value in run.state(shapes).items():
        kind, name = key.split("/", 1)
        assert kind != "master" or torch.equal(made[name].flatten().double(), value.double()), name


def test_experts_are_shared_beside_the_layers_of_stages(crew: Crew, tmp_path: Path) -> None:
    """Four ranks have half of the experts each of half of the layers, by twos that share layers, or that do not; or a
    quarter of the experts of all layers."""
    config = {**CONFIG, "plan": "all", "tied": True}
    one = through(crew, tmp_path / "one", config, WHOLE)
    parts: Sequence[Part] = (
        ((0, 1, 2, 3), 2, {"pp": 2, "tp": 2}), ((3, 1, 2, 0), 4, {"ep": 2, "tp": 2}), ((1, 0, 2, 3), 6, BOTH),
        ((3, 1, 2, 0), None, {"pp": 2, "tp": 2}),
    )  # fmt: skip
    moved = through(crew, tmp_path / "moved", config, parts, tp_sizes=(1, 2))
    assert_equal(one, moved)
    assert_exported(tmp_path / "moved", moved, one.shapes[0])


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_checkpoint_of_other_stages(crew: Crew, tmp_path: Path) -> None:
    first = through(crew, tmp_path / "first", CONFIG, [(range(4), 3)], **BOTH)
    assert_exported(tmp_path / "first", first, first.shapes[0])
    (newest, *_) = CheckpointStore(str(tmp_path / "first"), "run").list()
    config = {**CONFIG, "weights": f"{tmp_path / 'first'}/run/checkpoints/{newest.id}"}
    one = through(crew, tmp_path / "one", config, WHOLE)
    assert float(one.losses["loss 1"]) < float(first.losses["loss 1"]), "it begins with what the first has learnt"
    assert_equal(one, through(crew, tmp_path / "two", config, CHANGES[-1:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [{"fsdp2": {"cpu_offload": True}}, {"fsdp2": {"shard": []}, "frozen": True}], ids=["offload", "frozen"]
)
def test_every_way_equals_one_rank_with_all(crew: Crew, tmp_path: Path, way: dict[str, Any]) -> None:
    config = {**CONFIG, "frozen": way.get("frozen", False)}
    one = through(crew, tmp_path / "one", config, WHOLE)
    assert_equal(one, through(crew, tmp_path / "moved", {**config, **way}, CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{}, later("ZBVZeroBubble")], ids=["1f1b", "zbv"])
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path, schedule: dict[str, Any]) -> None:
    config = {**CONFIG, "precision": "float32", "rate": SLOWLY, "blocks": 6, "fsdp2": schedule}
    half = {**config, "fsdp2": {**schedule, **HALF}}
    exact = through(crew, tmp_path / "exact", config, WHOLE)
    still = through(crew, tmp_path / "still", half, WHOLE)
    assert_within_rounding(exact, still, through(crew, tmp_path / "moved", half, CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mesh", "pp"),
    [
        # The experts of each stage twice, and all else over four ranks; then four stages.
        pytest.param({}, {}, 4, id="edp"),
        pytest.param({**LOOPED, "tied": True}, {}, 4, id="interleaved-edp"),
        pytest.param({"plan": "all", "tied": True}, {"tp": 2}, 2, id="layers"),
        pytest.param({"sequences": True}, {"sp": 2}, 2, id="sequences"),
        pytest.param({**LOOPED, "plan": "all"}, {"tp": 2}, 2, id="interleaved-layers"),
    ],
)
def test_eight_ranks_equal_one(eight: Crew, tmp_path: Path, way: dict[str, Any], mesh: dict[str, int], pp: int) -> None:
    config = {**CONFIG, **way}
    one = through(eight, tmp_path / "one", config, WHOLE)
    parts: Sequence[Part] = (
        (range(8), 3, BOTH), ((5, 0, 6, 3), 5, STAGES), ((1, 7, 0, 2, 6, 5, 3, 4), 6, EXPERTS),
        ((4, 3, 1, 7, 5, 2, 0, 6), None, {**BOTH, "pp": pp}),
    )  # fmt: skip
    assert_equal(one, through(eight, tmp_path / "moved", config, parts, **mesh))


@pytest.mark.slow
def test_all_four_axes_at_once_equal_one_rank(tmp_path: Path) -> None:
    """Sixteen ranks, two along each axis; eight, with all experts of their stage; sixteen in the other order."""
    sixteen = Crew(16)
    try:
        config = {**CONFIG, "plan": "all", "tied": True, "sequences": True}
        one = through(sixteen, tmp_path / "one", config, WHOLE)
        parts: Sequence[Part] = ((range(16), 3, BOTH), (range(8, 0, -1), 5, STAGES), (range(15, -1, -1), None, BOTH))
        assert_equal(one, through(sixteen, tmp_path / "moved", config, parts, tp=2, sp=2))
    finally:
        sixteen.close()


@pytest.mark.parametrize(
    "way", [pytest.param({}, id="1f1b"), pytest.param({**LOOPED, "dropout": 0.2}, id="interleaved", marks=SLOW)]
)
def test_ranks_that_wait_in_an_exchange_with_a_dead_one_are_released(
    crew: Crew, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Rank 3, of the last stage, is killed in its first micro-batch: rank 1 waits for its rows, rank 2 for a gradient
    of it, and rank 0 for rank 1, while it shares no group with rank 3 but the world's."""
    config = {**CONFIG, **way, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {**of_run(config), **SIZES, "checkpoint_every_steps": 1, "anomalies": STOP}
    crew.begin([0, 1, 2, 3], "staged.train", {**config, "victims": [3], "at": AT}, **BOTH, **more)
    crew.reached(3, "there")
    crew.reached(0, f"committed step {AT}")
    for number in (0, 1, 2):
        crew.in_collective(number)
    crew.members[3].signal(signal.SIGKILL)
    crew.members[3].process.join()
    for number in (0, 1, 2):
        crew.abort(number, "rank 3 was lost")
    for number in (0, 1, 2):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(3)
    store, generations, points = CheckpointStore(str(tmp_path / "moved"), "run"), [], list[str]()
    assert store.list()[0].step == AT
    for who, end_at, mesh in (((2, 0), AT + 2, EXPERTS), ((0, 1, 2, 3), None, BOTH)):
        newest = store.list()[0].id
        generations.append(crew.run(who, "staged.train", config, checkpoint=newest, end_at=end_at, **mesh, **more))
        _assert_ended(generations[-1], "finished" if end_at is None else "ended", end_at or LAST_STEP)
        points += crew.members[0].points
    assert not any(point.startswith("left") for point in points), "the function stays in its loop"
    moved = Run(tmp_path / "moved", generations)
    one = through(crew, tmp_path / "one", {**CONFIG, **way}, WHOLE)
    assert _distance(one.after(AT), moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= EXACT


@pytest.mark.slow
def test_a_step_that_is_not_finite_in_one_pipeline_is_skipped_by_all(crew: Crew, tmp_path: Path) -> None:
    """Gradients that are not finite travel to the other pipeline's experts."""
    config, skip = {**CONFIG, "bad step": 3}, AnomalySettings(policy="skip")
    one = through(crew, tmp_path / "one", config, WHOLE, anomalies=skip)
    moved = through(crew, tmp_path / "moved", config, CHANGES[:1] + CHANGES[-1:], anomalies=skip)
    assert _distance(one.state(), moved.state()) <= EXACT
    assert _distance(one.after(4), moved.after(4)) <= ALLOWED
    assert {r.step for outcome in moved.outcomes for r in outcome.reports if r.skipped} == {4}


@pytest.mark.slow
def test_what_is_damaged_in_one_stage_is_restored_on_no_rank(crew: Crew, tmp_path: Path) -> None:
    through(crew, tmp_path, CONFIG, [(range(4), 3)], **BOTH)
    newest = damage_newest(tmp_path)
    config = {**CONFIG, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "staged.train", config, checkpoint=newest, **BOTH, **SIZES, **of_run(config))
    assert all("is not what was saved" in outcome.result.message for outcome in outcomes)
    assert all(outcome.result.step == 3 for outcome in outcomes), "no step was made"


def test_another_number_of_micro_batches_in_an_evaluation_is_refused_on_all_ranks(crew: Crew, tmp_path: Path) -> None:
    """They would wait for each other in layers of experts, for ever."""
    config = {**CONFIG, "evaluates unevenly": True, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "staged.train", config, **BOTH, **SIZES, **of_run(config))
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    said = "engine.eval_batch was called with 2 micro-batches on some ranks and with 3 on others"
    assert all(said in outcome.result.message for outcome in outcomes), [o.result.message for o in outcomes]

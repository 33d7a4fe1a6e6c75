"""Ranks that have different layers by torch.distributed.pipelining, each sharded by FSDP2, through other world sizes,
other numbers of stages and lost ranks; the oracles are one rank with all layers, and plain torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import AT, BATCH, LAST_STEP, WHOLE, Run, assert_every_sample_once, assert_means
from crew import Crew
from expert_model import BALANCE
from layered_model import loss_of
from pipeline_model import BLOCKS
from pipelined import content
from staged_model import Staged, StagedMixture, trained
from test_oracle import _assert_ended, _distance, damage_newest

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.settings import AnomalySettings
from elastic.engines.fsdp2.config import BACK, WEIGHTS_LATER

pytestmark = pytest.mark.processes
SLOW = pytest.mark.slow

# Clipping adds up norms in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
# Below the gradient's norm in every step.
CLIPPING = 0.3
FSDP2: dict[str, Any] = {"engine": "fsdp2", "clipping": CLIPPING}
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "engine": "fsdp2"}
STOP = AnomalySettings(policy="stop")
# Layers for two stages on each of four ranks.
LOOPED: dict[str, Any] = {"blocks": 6, "fsdp2": {"pipeline_schedule": "Interleaved1F1B"}}
SAID = "1 stage per rank: 4 ranks with 3 each need 12 layers with trained parameters (fsdp2.pipeline_stages_per_rank)"


def later(name: str) -> dict[str, Any]:
    return {"pipeline_schedule": name, "reshard_after_forward": False}


def through(crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Any], pp: int = 1) -> Run:
    return Run(url, cells.through(crew, url, "staged.train", config, parts, pp=pp, anomalies=STOP))


def through_stages(
    crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Any], tp: int = 1, sp: int = 1
) -> Run:
    """`parts`: members, number of ranks that share the layers, last step, and maybe the engine's options. Where these
    stay the same, functions of those that go on stay in their loop."""
    generations: list[Any] = []
    same = all(other == config.get("fsdp2") for _, _, _, *others in parts for other in others)
    config = {**config, "in_loop": same}
    checkpoint: str | None = None
    for who, pp, end_at, *other in parts:
        more = {**MORE, "end_at": end_at, "checkpoint": checkpoint, "pp": pp, "tp": tp, "sp": sp}
        options = {"fsdp2": other[0]} if other else {}
        outcomes = crew.run(who, "staged.train", {**config, **options, "url": str(url)}, **more)
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        assert cells.left(crew) <= {cells.STOOD_BY} or not same
        checkpoint = CheckpointStore(str(url), "run").list()[0].id
        generations.append(outcomes)
    return Run(url, generations, tp)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"fsdp2": {"pipeline_schedule": "GPipe"}}, id="gpipe", marks=SLOW),
        pytest.param({"tied": True, "dropout": 0.2}, id="1f1b-tied-dropout"),
        pytest.param({"tied": True, "fsdp2": {"micro_batch": 4}}, id="micro-batches of 4, 4 and 2", marks=SLOW),
        pytest.param({"fsdp2": {"reshard_after_forward": False, "shard": []}}, id="all at once", marks=SLOW),
        pytest.param({"tied": True, "fsdp2": {"cpu_offload": True}}, id="offload", marks=SLOW),
    ],
)
def test_stages_that_change_equal_one_rank_with_all_layers(crew: Crew, tmp_path: Path, way: dict[str, Any]) -> None:
    """Two pipelines of two, one of two, one of four, no pipeline on two ranks."""
    config = {**FSDP2, **way}
    one = through(crew, tmp_path / "one", config, WHOLE)
    parts = (((0, 1, 2, 3), 2, 2), ((3, 1), 2, 4), ((3, 1, 2, 0), 4, 6), ((2, 1), 1, None))
    moved = through_stages(crew, tmp_path / "moved", config, parts)
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED
    assert_every_sample_once(moved)
    (outcome,) = one.outcomes
    assert len(outcome.told["losses"]) == LAST_STEP
    assert_means(outcome, one)
    norms = {report.step: report.grad_norm for report in outcome.reports}
    for other in moved.outcomes:
        for report in other.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "of all stages, tied weights once"
    for last in moved.outcomes[-2:]:
        assert_means(last, one)
        assert last.told["evaluated"] == pytest.approx(outcome.told["evaluated"], abs=ALLOWED)


def test_what_passes_leave_in_a_layer_goes_with_it(crew: Crew, tmp_path: Path) -> None:
    """A buffer that is counted up by each pass of training, while one pipeline has other stages, in the same loops."""
    config = {**FSDP2, "counts": True}
    one = through(crew, tmp_path / "one", config, WHOLE)
    parts = (((0, 1), 2, 2), ((1, 2, 3, 0), 4, 3), ((2, 1, 0), 3, 6), ((1, 0), 2, None))
    assert_counted(one, through_stages(crew, tmp_path / "moved", config, parts))


def assert_counted(one: Run, moved: Run) -> None:
    counted = {name for name in one.state() if name.endswith("passes")}
    assert counted
    assert all(one.state()[name] > LAST_STEP for name in counted)
    assert _distance(one.state(), moved.state()) <= ALLOWED


@pytest.mark.parametrize(
    ("way", "fourth"),
    [
        pytest.param({"tied": True, "dropout": 0.2}, {"pipeline_schedule": "LoopedBFS"}, id="tied-dropout"),
        pytest.param({}, {"pipeline_schedule": "1F1B"}, id="untied", marks=SLOW),
        *[
            pytest.param(
                {"fsdp2": later(name), "tied": True, "dropout": 0.2, "views": True}, later(name), id=name, marks=SLOW
            )
            for name in WEIGHTS_LATER
        ],
    ],
)
def test_ranks_with_several_stages_equal_one_rank_with_all_layers(
    crew: Crew, tmp_path: Path, way: dict[str, Any], fourth: dict[str, Any]
) -> None:
    """Two pipelines of two ranks with two stages each; one, whose five micro-batches are no two rounds of one length;
    one of four ranks; two again, in another schedule."""
    config = {**FSDP2, **LOOPED, **way}
    one = through(crew, tmp_path / "one", config, WHOLE)
    parts = (((0, 1, 2, 3), 2, 2), ((3, 1), 2, 4), ((3, 1, 2, 0), 4, 6), ((2, 1, 0, 3), 2, None, fourth))
    moved = through_stages(crew, tmp_path / "moved", config, parts)
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED
    assert_every_sample_once(moved)
    (outcome,) = one.outcomes
    norms = {report.step: report.grad_norm for report in outcome.reports}
    for other in moved.outcomes:
        for report in other.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "tied weights once"
    for last in moved.outcomes[-4:]:
        assert last.told["evaluated"] == pytest.approx(outcome.told["evaluated"], abs=ALLOWED)
    held = [{name.split(".")[1] for name in other.told["names"] if "layers" in name} for other in moved.outcomes]
    expected = ["05", "1234"] if fourth["pipeline_schedule"] in BACK else ["034", "125"]
    assert held[:2] == [set(numbers) for numbers in expected]


@pytest.mark.slow
def test_layers_that_do_not_suffice_for_all_stages_are_fewer_stages(crew: Crew, tmp_path: Path) -> None:
    """Of seven layers six stages on two ranks, and four on four."""
    options = {"pipeline_schedule": "LoopedBFS", "pipeline_stages_per_rank": 3}
    config = {**FSDP2, "fsdp2": options}
    one = through(crew, tmp_path / "one", config, WHOLE)
    moved = through_stages(crew, tmp_path / "moved", config, (((0, 1), 2, 4), ((0, 1, 2, 3), 4, None)))
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED
    said = [[report.travel for report in moved.outcomes[rank].reports if report.travel] for rank in (0, 2)]
    assert said == [[], [SAID]]


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param({}, id="1f1b"), pytest.param(LOOPED, id="interleaved")])
def test_what_stages_have_saved_is_exported_as_the_whole_model(crew: Crew, tmp_path: Path, way: dict[str, Any]) -> None:
    run = through(crew, tmp_path, {**FSDP2, **way, "tied": True}, [(range(4), 3)], pp=2)
    (newest, *_) = CheckpointStore(str(tmp_path), "run").list()
    made = elastic.export(f"{tmp_path}/run/checkpoints/{newest.id}", tmp_path / "out", to="torch") / "model.pt"
    whole = Staged(tied=True, blocks=way.get("blocks", BLOCKS))
    whole.load_state_dict(torch.load(made, weights_only=True))
    for key, value in run.state().items():
        kind, name = key.split("/", 1)
        assert kind != "master" or torch.equal(whole.get_parameter(name).flatten().double(), value), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Staged, StagedMixture])
def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path, kind: type[Staged]) -> None:
    """What the oracles here and of experts in stages are worth: losses and gradient norms."""
    config = {**FSDP2, "schedule": False, "tied": True, "experts": kind is StagedMixture}
    one = through(crew, tmp_path, config, WHOLE)
    (outcome,) = one.outcomes
    assert outcome.told["length"] == 4, "the first epoch's steps"
    model = kind(tied=True)
    model.load_state_dict(outcome.told["initial"], strict=False)
    optimizer, losses, norms = torch.optim.AdamW(trained(model), lr=0.02), [], []
    for begin in range(0, len(outcome.indices), 10):
        step = outcome.indices[begin : begin + 10]
        optimizer.zero_grad()
        losses.append(0.0)
        for first in range(0, len(step), 2):
            words, labels = content(step[first : first + 2])
            logits, *uneven = model.called(words)
            loss = loss_of(logits, labels) + BALANCE * sum(uneven)
            loss = loss * len(step[first : first + 2]) / len(step)
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained(model), CLIPPING)))
        optimizer.step()
    assert outcome.told["losses"] == pytest.approx(losses, abs=ALLOWED)
    assert [report.grad_norm for report in outcome.reports] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > CLIPPING


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param({}, id="1f1b"), pytest.param(LOOPED, id="interleaved")])
def test_a_stage_that_waits_for_a_dead_one_is_released_and_the_run_continues(
    crew: Crew, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Rank 1, the last stage of the first pipeline, is killed in its first micro-batch: rank 0 waits for a gradient of
    it, rank 3 for its sums, and rank 2 for rank 3, while it shares no group with rank 1 but the world's."""
    assert_survivors_go_on(crew, tmp_path, {**FSDP2, **way, "tied": True}, waits=(0, 2), then=(3, 0))


def assert_survivors_go_on(
    crew: Crew, url: Path, config: dict[str, Any], waits: Sequence[int], then: Sequence[int]
) -> list[Any]:
    """Of pipelines of two ranks, rank 1 is killed in a pass when those in `waits` wait; `then` some go on, then all.
    The survivors stay in their loop."""
    own, everyone = {**config, "in_loop": True, "url": str(url / "moved")}, range(len(crew.members))
    more: dict[str, Any] = {**MORE, "checkpoint_every_steps": 1, "pp": 2, "anomalies": STOP}
    crew.begin(everyone, "staged.train", {**own, "victims": [1], "at": AT, "ranks": len(everyone)}, **more)
    crew.reached(1, "there")
    crew.reached(0, f"committed step {AT}")
    for number in waits:
        crew.in_collective(number)
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    survivors = [number for number in everyone if number != 1]
    for number in survivors:
        crew.abort(number, "rank 1 was lost")
    for number in survivors:
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(1)
    store = CheckpointStore(str(url / "moved"), "run")

    shrunk = crew.run(then, "staged.train", own, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run(everyone, "staged.train", own, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)

    assert cells.left(crew) == set()
    for number in survivors:
        assert (grown[number].told["calls"], grown[number].told["abandoned"]) == (1, 1)

    moved = Run(url / "moved", [shrunk, grown])
    one = through(crew, url / "one", config, WHOLE)
    assert _distance(one.after(AT), moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED
    return [shrunk, grown]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"no pipeline": True}, "mesh: {pp: 2} needs pipeline=elastic.Pipeline(loss_fn, layers=[...])"),
        pytest.param({"stray": True}, "'scale' is of no layer of the pipeline", marks=SLOW),
        pytest.param(
            {"fsdp2": {"shard": ["ModuleList"]}}, "shard names ModuleList, which has layers of the pipeline", marks=SLOW
        ),
        pytest.param(
            {"fsdp2": {"pipeline_schedule": "zigzag"}}, "pipeline_schedule must be 1F1B or GPipe or", marks=SLOW
        ),
    ],
)
def test_what_is_refused_is_named_on_all_ranks(crew: Crew, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    outcomes = crew.run(range(2), "staged.train", {**FSDP2, **config, "url": str(tmp_path)}, pp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert all(said in outcome.result.message for outcome in outcomes), [o.result.message for o in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drifts", "said"),
    [
        ("master/embed.weight", "the copies of the tied parameter 'embed.weight' have drifted apart"),
        ("step/norm.weight", "optimizer scalars of norm.weight on rank 3 differs"),
    ],
)
def test_copies_that_drift_apart_are_told_on_all_ranks(crew: Crew, tmp_path: Path, drifts: str, said: str) -> None:
    """Between the stages that share a tied one, and within a stage."""
    drift = [1, 3] if "embed" in drifts else [3]
    config = {**FSDP2, "tied": True, "drifts after": 2, "drifts": drifts, "drift": drift, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "staged.train", config, end_at=2, pp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    assert any(said in outcome.result.message for outcome in outcomes)
    assert not CheckpointStore(str(tmp_path), "run").list()


@pytest.mark.slow
def test_what_is_damaged_in_one_stage_is_restored_on_no_rank(crew: Crew, tmp_path: Path) -> None:
    through(crew, tmp_path, FSDP2, [(range(4), 3)], pp=2)
    newest = damage_newest(tmp_path)
    outcomes = crew.run(range(2), "staged.train", {**FSDP2, "url": str(tmp_path)}, checkpoint=newest, pp=2, **MORE)
    assert all("is not what was saved" in outcome.result.message for outcome in outcomes)
    assert all(outcome.result.step == 3 for outcome in outcomes), "no step was made"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{}, later("ZBVZeroBubble")], ids=["1f1b", "zbv"])
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path, schedule: dict[str, Any]) -> None:
    config = {**FSDP2, "tied": True, "fsdp2": {"param_dtype": "bfloat16", "reduce_dtype": "float32", **schedule}}
    still = through(crew, tmp_path / "still", config, (((0, 1), None),), pp=2)
    moved = through(crew, tmp_path / "moved", config, cells.MOVED, pp=2)
    assert _distance(still.losses, moved.losses) <= 2e-2


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"dropout": 0.2}, id="untied", marks=SLOW),
        pytest.param({"tied": True, "dropout": 0.2}, id="tied"),
        pytest.param(
            {"tied": True, "deferred": "absent", "seeded by": "pp", "precision": "float64"}, id="built without memory"
        ),
        pytest.param({"fsdp2": {"pipeline_schedule": "GPipe"}}, id="gpipe", marks=SLOW),
        pytest.param({**LOOPED, "tied": True, "dropout": 0.2}, id="interleaved-tied", marks=SLOW),
        pytest.param({**LOOPED, "fsdp2": later("DualPipeV"), "tied": True}, id="dualpipev-tied", marks=SLOW),
    ],
)
def test_stages_whose_layers_are_shared_equal_one_rank_with_all_layers(
    crew: Crew, tmp_path: Path, way: dict[str, Any]
) -> None:
    """A pipeline of two stages of two ranks each; layers shared by two ranks that have all; the pipeline again."""
    config = {**FSDP2, **way, "plan": "all"}
    one = through(crew, tmp_path / "one", {**config, "deferred": way.get("deferred") and "there"}, WHOLE)
    parts = (((0, 1, 2, 3), 2, 3), ((3, 1), 1, 5), ((3, 1, 2, 0), 2, None))
    moved = through_stages(crew, tmp_path / "moved", config, parts, tp=2)
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state(one.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)
    folder = elastic.export(tmp_path / "moved" / "run", tmp_path / "out", to="torch")
    expected = moved.state(one.shapes[0])
    for name, value in torch.load(folder / "model.pt").items():
        stored = [
            expected[key] for key in (f"{kind}/{name}" for kind in ("master", "param", "buffer")) if key in expected
        ]
        assert stored or name == "head.weight", "what is tied has one name"
        assert all(torch.equal(value.flatten(), each) for each in stored), name
    (outcome,) = one.outcomes
    norms = {report.step: report.grad_norm for report in outcome.reports}
    for other in moved.outcomes:
        for report in other.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "each element once"
    for rank, last in enumerate(moved.outcomes[-4:]):
        assert last.told["coordinates"] == {"dp": 0, "sp": 0, "tp": rank % 2, "ep": 0, "pp": rank // 2}
        assert_means(last, one)
        assert last.told["evaluated"] == pytest.approx(outcome.told["evaluated"], abs=ALLOWED)


@pytest.mark.slow
def test_a_tied_parameter_that_is_cut_in_one_stage_only_is_refused(crew: Crew, tmp_path: Path) -> None:
    """In another stage it is whole, so that neither sees it by itself."""
    config = {**FSDP2, "tied": True, "plan": "head", "url": str(tmp_path)}
    outcomes = crew.run(range(4), "staged.train", config, pp=2, tp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    said = "tp_plan cuts the tied parameter 'embed.weight' in one stage as in no other"
    assert all(said in outcome.result.message for outcome in outcomes), [o.result.message for o in outcomes]

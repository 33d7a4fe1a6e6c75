"""Ranks that have different layers (DeepSpeed's PipelineModule), through other world sizes, other numbers of stages and
lost ranks; the oracles are one rank with all layers, and plain torch."""

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
from pipeline_model import layers, loss_of, whole
from pipelined import content
from test_fsdp2_pipeline import assert_counted
from test_oracle import _assert_ended, _distance, damage_newest

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

# Clipping adds up norms in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
# Below the gradient's norm in every step.
CLIPPING = 0.3
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4}
STOP = AnomalySettings(policy="stop")
MOVED = cells.MOVED


def through(crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Any], pp: int = 1) -> Run:
    return Run(url, cells.through(crew, url, "pipelined.train", config, parts, pp=pp, anomalies=STOP))


CASES = [
    pytest.param({"stage": 1, "clipping": CLIPPING}, id="stage1", marks=pytest.mark.slow),
    pytest.param({"stage": 1, "clipping": CLIPPING, "tied": True, "dropout": 0.2}, id="stage1-tied-dropout"),
    pytest.param({"stage": 0, "clipping": 0.0, "tied": True}, id="stage0-tied"),
    *(
        pytest.param({**each, "clipping": CLIPPING}, id="stage1-offload", marks=pytest.mark.slow)
        for each in cells.offloaded(1)
    ),
]


@pytest.mark.parametrize("config", CASES)
def test_a_run_in_stages_equals_one_rank_with_all_layers(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    one = through(crew, tmp_path / "one", config, WHOLE)
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, MOVED, pp=2)
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert [last.told["calls"] for last in moved.outcomes[-2:]] == [1, 1], "of the ranks that were always there"
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
    for rank, last in enumerate(moved.outcomes[-4:]):
        assert last.told["coordinates"] == {"dp": rank // 2, "sp": 0, "tp": 0, "ep": 0, "pp": rank % 2}
        assert_means(last, one)
        assert last.told["evaluated"] == pytest.approx(outcome.told["evaluated"], abs=ALLOWED)


def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path) -> None:
    """What the oracle above is worth."""
    one = through(crew, tmp_path, {"stage": 1, "schedule": False, "clipping": CLIPPING, "tied": True}, WHOLE)
    (outcome,) = one.outcomes
    assert outcome.told["length"] == 4, "the first epoch's steps"
    model = whole(layers(tied=True))
    initial = {name.replace("tied_modules.words", "0"): value for name, value in outcome.told["initial"].items()}
    model.load_state_dict({f"parts.{name}": value for name, value in initial.items()}, strict=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02), []
    for begin in range(0, len(outcome.indices), 10):
        step = outcome.indices[begin : begin + 10]
        optimizer.zero_grad()
        losses.append(0.0)
        for first in range(0, len(step), 2):
            tokens, labels = content(step[first : first + 2])
            loss = loss_of(model(tokens), labels) * len(step[first : first + 2]) / len(step)
            loss.backward()
            losses[-1] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, CLIPPING)
        optimizer.step()
    assert outcome.told["losses"] == pytest.approx(losses, abs=ALLOWED)


def test_an_evaluation_has_micro_batches_of_its_own_size(crew: Crew, tmp_path: Path) -> None:
    """Stages receive activations into memory of the shape that they were last told of."""
    config = {"stage": 1, "evaluates at": 3}
    one = through(crew, tmp_path / "one", config, WHOLE)
    two = through(crew, tmp_path / "two", config, [((0, 1), None)], pp=2)
    assert _distance(one.losses, two.losses) <= ALLOWED
    found = [outcome.told["evaluated in the loop"] for outcome in (*one.outcomes, *two.outcomes)]
    assert found == pytest.approx([found[0]] * 3, abs=ALLOWED)


def test_what_passes_leave_in_a_layer_goes_with_it(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "counts": True}
    one = through(crew, tmp_path / "one", config, WHOLE)
    parts = [
        ((0, 1), 2, {"pp": 2}), ((1, 2, 3, 0), 3, {"pp": 4}), ((2, 1, 0), 6, {"pp": 3}), ((1, 0), None, {"pp": 2}),
    ]  # fmt: skip
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, parts)
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert_counted(one, moved)


@pytest.mark.slow
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "dtype": "bf16", "tied": True}
    still = through(crew, tmp_path / "still", config, (((0, 1), None),), pp=2)
    moved = through(crew, tmp_path / "moved", config, MOVED, pp=2)
    assert _distance(still.losses, moved.losses) <= 2e-2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"module": {"num_stages": 4}}, "given num_stages=4, and the job's mesh says pp: 2"),
        ({"module": {"loss_fn": None}}, "PipelineModule needs loss_fn="),
        ({"stage": 2}, "stage is 2: DeepSpeed's pipelines train with stages 0 and 1"),
        ({"stage": 0, "clipping": 0.5}, "gradient_clipping is 0.5"),
        ({"stray": True}, "scale is not of a layer, so that every stage would train or keep a copy of it"),
        ({"layers whole": True}, "{pp: 2} needs a deepspeed.pipe.PipelineModule"),
    ],
)
def test_what_is_refused_is_named_on_all_ranks(crew: Crew, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    outcomes = crew.run(range(2), "pipelined.train", {"stage": 1, **config, "url": str(tmp_path)}, pp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert all(said in outcome.result.message for outcome in outcomes), [o.result.message for o in outcomes]


def test_a_stage_that_waits_for_a_dead_one_is_released_and_the_run_continues(crew: Crew, tmp_path: Path) -> None:
    """Rank 1, the last stage of the first pipeline, is killed in its first micro-batch: rank 0 waits for a gradient of
    it, ranks 2 and 3 for its sums."""
    config = {"stage": 1, "tied": True, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {**MORE, "checkpoint_every_steps": 1, "pp": 2, "anomalies": STOP}
    crew.begin([0, 1, 2, 3], "pipelined.train", {**config, "victims": [1], "at": AT}, **more)
    crew.reached(1, "there")
    crew.reached(0, f"committed step {AT}")
    crew.in_collective(0)
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    for number in (0, 2, 3):
        crew.abort(number, "rank 1 was lost")
    for number in (0, 2, 3):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(1)
    store = CheckpointStore(str(tmp_path / "moved"), "run")

    shrunk = crew.run([3, 0], "pipelined.train", config, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run([0, 1, 2, 3], "pipelined.train", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert cells.left(crew) == set()
    for number in (0, 2, 3):
        assert (grown[number].told["calls"], grown[number].told["abandoned"]) == (1, 1)

    moved = Run(tmp_path / "moved", [shrunk, grown])
    one = through(crew, tmp_path / "one", {"stage": 1, "tied": True}, WHOLE)
    assert _distance(one.after(AT), moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"hooks": True}, "it has changed layers after its PipelineModule had built them"),
        ({"grouped": True}, "it has given groups of parameters"),
    ],
)
def test_what_nobody_would_do_with_other_layers_is_a_reason_to_be_called_again(
    crew: Crew, tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    config = {"stage": 1, "in_loop": True, "schedule": False, **config}
    still = through(crew, tmp_path / "still", {**config, "in_loop": False}, [((0, 1), None)], pp=2)
    more: dict[str, Any] = {**MORE, "pp": 2, "anomalies": STOP}
    config["url"] = str(tmp_path / "moved")
    generations = [crew.run((0, 1), "pipelined.train", config, end_at=3, **more)]
    assert all(any(why in point for point in member.points) for member in crew.members[:2])
    newest = CheckpointStore(config["url"], "run").list()[0].id
    generations.append(crew.run((1, 0), "pipelined.train", config, checkpoint=newest, **more))
    moved = Run(tmp_path / "moved", generations)
    assert _distance(still.losses, moved.losses) <= ALLOWED
    assert _distance(still.state(), moved.state()) <= ALLOWED


@pytest.mark.parametrize(
    ("drifts", "where", "said"),
    [
        pytest.param(
            "2.mlp.down_proj.weight",
            {"pp": 0, "dp": 1},
            "weights of 2.mlp.down_proj.weight on rank 2",
            marks=pytest.mark.slow,
        ),
        ("tied_modules.words.weight", {"pp": 1}, "the tied parameter 'tied_modules.words.weight' have drifted apart"),
    ],
)
def test_copies_that_drift_apart_are_told_on_all_ranks(
    crew: Crew, tmp_path: Path, drifts: str, where: dict[str, int], said: str
) -> None:
    """Within a stage, and between the stages that share a tied one."""
    config = {"stage": 1, "tied": True, "drifts after": 2, "drifts": drifts, "where": where, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "pipelined.train", config, end_at=2, pp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    assert any(said in outcome.result.message for outcome in outcomes)
    assert not CheckpointStore(str(tmp_path), "run").list()


def test_what_is_damaged_in_one_stage_is_restored_on_no_rank(crew: Crew, tmp_path: Path) -> None:
    through(crew, tmp_path, {"stage": 1}, [(range(4), 3)], pp=2)
    newest = damage_newest(tmp_path)
    outcomes = crew.run(
        range(2), "pipelined.train", {"stage": 1, "url": str(tmp_path)}, checkpoint=newest, pp=2, **MORE
    )
    assert all("is not what was saved" in outcome.result.message for outcome in outcomes)
    assert all(outcome.result.step == 3 for outcome in outcomes), "no step was made"


def test_the_number_of_stages_may_change(crew: Crew, tmp_path: Path) -> None:
    """Checkpoints hold whole tensors under the names of the whole model."""
    config = {"stage": 1, "clipping": CLIPPING, "tied": True, "dropout": 0.2}
    one = through(crew, tmp_path / "one", config, WHOLE)
    url, generations = tmp_path / "moved", []
    checkpoint: str | None = None
    for who, pp, end_at in (((0, 1), 2, 2), ((3, 1, 2, 0), 4, 4), ((0, 1), 1, 6), ((2, 1, 0), 3, None)):
        outcomes = crew.run(
            who, "pipelined.train", {**config, "url": str(url)}, end_at=end_at, checkpoint=checkpoint, pp=pp, **MORE
        )
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        checkpoint = CheckpointStore(str(url), "run").list()[0].id
        generations.append(outcomes)
    moved = Run(url, generations)
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED
    assert_every_sample_once(moved)
    (newest, *_) = CheckpointStore(str(url), "run").list()
    made = elastic.export(f"{url}/run/checkpoints/{newest.id}", tmp_path / "out", to="torch") / "model.pt"
    exported = torch.load(made, weights_only=True)
    for key, value in moved.state().items():
        kind, name = key.split("/", 1)
        assert kind != "master" or torch.equal(exported[name].flatten().double(), value), name

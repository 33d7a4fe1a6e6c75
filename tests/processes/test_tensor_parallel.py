"""Ranks that share layers (AutoTP, or torch's own), through other world sizes and lost ranks; the oracles are one rank
with whole layers, and plain torch. What is FSDP2's alone is in test_fsdp2_tensor_parallel."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import BATCH, LAST_STEP, MOVED, WHOLE, Part, Run, assert_every_sample_once
from crew import Crew
from layered_model import EVEN, Transformer, loss_of, text
from test_oracle import _assert_ended, _distance, damage_newest

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

# Slices are multiplied apart and added up in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
# Below the gradient's norm in every step.
CLIPPING = 0.3
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4}
# Also where DeepSpeed computes no norm of its own, there is one.
STOP = AnomalySettings(policy="stop")


def through(
    crew: Crew,
    url: Path,
    config: Mapping[str, Any],
    parts: Sequence[Part],
    tp: int = 2,
    anomalies: AnomalySettings = STOP,
) -> Run:
    generations = cells.through(crew, url, "tensor_parallel.train", config, parts, tp=tp, anomalies=anomalies)
    return Run(url, generations, tp)


CASES = [
    *(pytest.param({"stage": stage}, id=f"stage{stage}") for stage in (0, 1, 2, 3)),
    # Query, key and value in one matrix, gate and up in another, whose hidden size is odd.
    pytest.param({"stage": 2, "fused": True}, id="stage2-fused"),
    *(pytest.param({"stage": s, "fused": True}, id=f"stage{s}-fused", marks=pytest.mark.slow) for s in (0, 1, 3)),
    # No layer's slices have dropout in them: it is drawn alike on all ranks of a cell.
    pytest.param({"stage": 1, "dropout": 0.2}, id="stage1-dropout"),
    pytest.param({"stage": 3, "dropout": 0.2}, id="stage3-dropout"),
    *(
        pytest.param(each, id=f"stage{each['stage']}-offload", marks=pytest.mark.slow)
        for each in cells.offloaded(1, 2, 3)
    ),
    *(
        pytest.param({"stage": stage, "compiled": True}, id=f"stage{stage}-compiled", marks=pytest.mark.slow)
        for stage in (0, 1, 2, 3)
    ),
    pytest.param({"engine": "fsdp2"}, id="fsdp2"),
    pytest.param({"engine": "fsdp2", "dropout": 0.2, "in_loop": True}, id="fsdp2-dropout-in-loop"),
    *(pytest.param({"stage": s, "in_loop": True}, id=f"stage{s}-in-loop", marks=pytest.mark.slow) for s in (0, 1, 2)),
    pytest.param({"stage": 3, "dropout": 0.2, "in_loop": True}, id="stage3-dropout-in-loop"),
    pytest.param({"stage": 1, "compiled": True, "in_loop": True}, id="stage1-compiled-in-loop"),
]
# Engines that cut some of the state over the ranks of a lane, and cut all of it.
SKEWED = "layers.0.input_layernorm.weight"
SOME = [{"stage": 1}, {"stage": 3}, {"engine": "fsdp2"}]


def spec_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**cells.of_run(config), "tp": 2}


@pytest.mark.parametrize("config", CASES)
def test_a_run_with_shared_layers_equals_one_rank_with_whole_ones(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    config = {**config, "clipping": CLIPPING}
    whole = through(crew, tmp_path / "whole", config, WHOLE, tp=1)
    moved = through(crew, tmp_path / "moved", config, MOVED)
    assert cells.left(crew) <= {cells.STOOD_BY}, "layers that were cut can be cut anew"
    if config.get("in_loop"):
        assert [outcome.told["calls"] for outcome in moved.outcomes[-2:]] == [1, 1], "of those that were never away"
    shapes = whole.shapes[0]
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(shapes), moved.state(shapes)) <= ALLOWED
    assert_every_sample_once(moved)
    assert [dict(outcome.told["coordinates"]) for outcome in moved.outcomes[-4:]] == [
        {"dp": cell, "sp": 0, "tp": lane, "ep": 0, "pp": 0} for cell in (0, 1) for lane in (0, 1)
    ]
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    assert min(norms.values()) > CLIPPING, "gradients were clipped"
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "of whole layers, once"


@pytest.mark.parametrize("plain", SOME)
def test_a_whole_parameter_that_is_applied_to_slices(crew: Crew, tmp_path: Path, plain: dict[str, Any]) -> None:
    """A norm of each head's queries: every rank has a part of its gradient, added up where the engine is told."""
    config = {**plain, "normed": True}
    given = {**config, "url": str(tmp_path / "refused")}
    outcomes = crew.run(range(4), "tensor_parallel.train", given, **spec_of(config))
    said = {outcome.result.message for outcome in outcomes if outcome.result.kind == "usage_error"}
    assert len(said) == 1, [outcome.result for outcome in outcomes]
    assert "different gradients of layers.0.self_attn.q_norm.weight (2 such parameters)" in said.pop()
    whole = through(crew, tmp_path / "whole", config, WHOLE, tp=1)
    moved = through(crew, tmp_path / "moved", {**config, "added up": True}, [(range(4), 3), ((2, 0), None)])
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED


@pytest.mark.parametrize("stage", [1, 3])
def test_heads_and_columns_that_cannot_be_shared_evenly(crew: Crew, tmp_path: Path, stage: int) -> None:
    """Four heads over three ranks, and 21 columns over two and three."""
    whole = through(crew, tmp_path / "whole", {"stage": stage}, WHOLE, tp=1)
    three = through(crew, tmp_path / "three", {"stage": stage}, [((0, 1, 2), 3), ((3, 0, 1), None)], tp=3)
    assert three.shapes[0]["layers.0.self_attn.q_proj.weight"] == (8, 16)
    assert three.shapes[2]["layers.0.self_attn.q_proj.weight"] == (4, 16)
    assert _distance(whole.losses, three.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), three.state(whole.shapes[0])) <= ALLOWED


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "dtype": "bf16"}
    still = through(crew, tmp_path / "still", config, [((0, 1, 2, 3), None)])
    moved = through(crew, tmp_path / "moved", config, MOVED)
    assert _distance(still.losses, moved.losses) <= 1e-2
    for one, other in zip(still.lanes, moved.lanes, strict=True):
        assert _distance(one, other) <= 1e-2


@pytest.mark.parametrize(("plain", "shapes"), [({"stage": 1}, {}), ({"engine": "fsdp2"}, EVEN)])
def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path, plain: dict[str, Any], shapes: dict[str, Any]) -> None:
    """What the oracle above is worth."""
    whole = through(crew, tmp_path, {**plain, "schedule": False, "clipping": CLIPPING}, WHOLE, tp=1)
    (outcome,) = whole.outcomes
    expected = plain_torch(outcome.indices, shapes)
    assert {f"loss {step}": loss for step, loss in enumerate(expected[0], 1)} == pytest.approx(
        {name: float(loss) for name, loss in whole.losses.items()}, abs=ALLOWED
    )
    for name, value in expected[1].items():
        assert torch.allclose(outcome.told["weights"][name], value, atol=ALLOWED), name


def plain_torch(indices: Sequence[int], shapes: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps of ten samples, and a last one of the rest; the gradient is clipped."""
    torch.manual_seed(3)
    model = Transformer(**shapes)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02), []
    for begin in range(0, len(indices), 10):
        samples = [text(index) for index in indices[begin : begin + 10]]
        tokens, labels = (torch.stack(part) for part in zip(*samples, strict=True))
        loss = loss_of(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIPPING)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def test_a_rank_without_a_dead_peer_is_released_and_the_run_continues(crew: Crew, tmp_path: Path) -> None:
    """Rank 1 is killed. Rank 2 has no group with it and waits for rank 0, which computes: nothing but an abort would
    end that."""
    config = {"stage": 0, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {**MORE, "checkpoint_every_steps": 1, "tp": 2}
    crew.begin(
        [0, 1, 2, 3], "tensor_parallel.train", {**config, "victims": [0, 1], "at": 4, "where": "backward"}, **more
    )
    for number in range(4):
        crew.reached(number, "there")
    crew.reached(0, "committed step 4")
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    crew.in_collective(2)
    for number in (2, 3):
        crew.abort(number, "rank 1 was lost")
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    for number in (0, 1):
        crew.replace(number)
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == 4

    shrunk = crew.run([3, 2], "tensor_parallel.train", config, checkpoint=store.list()[0].id, end_at=6, **more)
    _assert_ended(shrunk, "ended", 6)
    # Rank 2 has other slices now, in the same layers.
    assert not cells.left(crew)
    grown = crew.run([0, 1, 2, 3], "tensor_parallel.train", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)

    whole = through(crew, tmp_path / "whole", {"stage": 0}, WHOLE, tp=1)
    moved = Run(tmp_path / "moved", [shrunk, grown], 2)
    expected = {name: loss for name, loss in whole.losses.items() if int(name.removeprefix("loss ")) > 4}
    assert _distance(expected, moved.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED


@pytest.mark.parametrize("plain", [*({"stage": stage} for stage in (0, 1, 2, 3)), {"engine": "fsdp2"}])
def test_a_gradient_that_is_not_finite_in_one_lane_is_seen_by_all(
    crew: Crew, tmp_path: Path, plain: dict[str, Any]
) -> None:
    config = {**plain, "nan at": 2}
    run = through(crew, tmp_path, config, [(range(4), None)], anomalies=AnomalySettings(policy="skip"))
    for outcome in run.outcomes:
        assert [report.step for report in outcome.reports if report.anomaly] == [3]
    for name, shape in run.shapes[0].items():
        if shape == run.shapes[1][name] and "norm" in name:
            assert torch.equal(run.lanes[0][kind_of(run, name)], run.lanes[1][kind_of(run, name)]), name


def kind_of(run: Run, name: str) -> str:
    return next(key for key in run.lanes[0] if key.split("/", 1)[1] == name)


@pytest.mark.parametrize("victim", [1, 3])
def test_copies_that_drift_apart_in_one_lane_are_told_on_all_ranks(crew: Crew, tmp_path: Path, victim: int) -> None:
    config = {"stage": 0, "drift at": 1, "victim": victim, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "tensor_parallel.train", config, end_at=2, tp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    said = [outcome.result.message for outcome in outcomes]
    for rank in (1, 3):
        assert "layers.0.mlp.up_proj.weight" in said[rank]
    assert any(f"on rank {rank}" in said[1] for rank in (1, 3))
    for rank in (0, 2):
        assert "the ranks with tensor coordinate 1" in said[rank]
    assert not CheckpointStore(str(tmp_path), "run").list()


@pytest.mark.parametrize(("stage", "size"), [(0, 4), (2, 2)])
def test_a_copy_that_drifts_away_from_the_other_lanes_is_named(
    crew: Crew, tmp_path: Path, stage: int, size: int
) -> None:
    """Equal within its lane, so that data-parallel copies do not tell."""
    for message in drifted(crew, tmp_path, {"stage": stage}, size):
        assert f"{SKEWED} on rank {', '.join(map(str, range(1, size, 2)))}" in message


@pytest.mark.parametrize(
    ("plain", "name"),
    [
        ({"stage": 3}, "embed.weight"),
        ({"engine": "fsdp2"}, SKEWED),
        ({"engine": "fsdp2", "fsdp2": {"cpu_offload": True}}, SKEWED),
    ],
)
def test_a_copy_of_which_each_rank_has_a_part_is_compared_within_cells(
    crew: Crew, tmp_path: Path, plain: dict[str, Any], name: str
) -> None:
    for rank, message in enumerate(drifted(crew, tmp_path, plain, 4, name)):
        assert f"{name} on rank {1 if rank < 2 else 3} differs" in message


def drifted(crew: Crew, url: Path, plain: dict[str, Any], size: int, name: str = SKEWED) -> list[str]:
    """What each rank says where one lane has had another gradient of a parameter that is not cut."""
    config = {**plain, "skewed at": 1, "skewed": name, "schedule": False, "url": str(url)}
    outcomes = crew.run(range(size), "tensor_parallel.train", config, end_at=2, **spec_of(config))
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}, outcomes[0].result.message
    assert not CheckpointStore(str(url), "run").list()
    return [outcome.result.message for outcome in outcomes]


@pytest.mark.parametrize("plain", SOME)
def test_what_is_damaged_in_one_lane_is_restored_on_no_rank(crew: Crew, tmp_path: Path, plain: dict[str, Any]) -> None:
    run = through(crew, tmp_path, plain, [(range(4), 3)])
    assert run.lanes
    newest = damage_newest(tmp_path)
    config = {**plain, "url": str(tmp_path)}
    outcomes = crew.run(range(2), "tensor_parallel.train", config, checkpoint=newest, **spec_of(config))
    assert all("is not what was saved" in outcome.result.message for outcome in outcomes)
    assert all(outcome.result.step == 3 for outcome in outcomes), "no step was made"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"seeded by": "tp"}, "the ranks that share layers or experts have different values of embed.weight"),
        ({"tensor_parallel": {"autotp_size": 4}}, "autotp_size is 4, and the job's mesh says tp: 2"),
        ({"tensor_parallel": {"vocab_parallel_lm_head": True}}, "vocab_parallel_lm_head: losses over slices"),
        (
            {"tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": []}}},
            "AutoTP has found no layer to slice in Transformer",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(crew: Crew, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    given = {"stage": 1, "url": str(tmp_path), **config}
    outcomes = crew.run(range(2), "tensor_parallel.train", given, tp=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert all(said in outcome.result.message for outcome in outcomes)


@pytest.mark.parametrize("plain", [{"stage": 2}, {"engine": "fsdp2"}])
def test_cells_may_be_seeded_apart_since_the_first_ones_weights_are_all_cells(
    crew: Crew, tmp_path: Path, plain: dict[str, Any]
) -> None:
    alike = through(crew, tmp_path / "alike", plain, [(range(4), None)])
    apart = through(crew, tmp_path / "apart", {**plain, "seeded by": "dp"}, [(range(4), None)])
    assert _distance(alike.losses, apart.losses) <= ALLOWED


@pytest.mark.parametrize("plain", [{"stage": 1}, {"engine": "fsdp2"}])
def test_exchanges_are_in_the_ledger(crew: Crew, tmp_path: Path, plain: dict[str, Any]) -> None:
    run = through(crew, tmp_path, plain, [(range(4), None)])
    (report,) = [report for report in run.outcomes[0].reports if report.step == 2]
    calls = {(use.op, use.axis): use.calls for use in report.collectives}
    # 3 micro-batches: two layers' attention and MLP, forth and back; the norm.
    assert calls["all_reduce", "tp"] >= 3 * 2 * 4
    assert any(axis == "dp" for _, axis in calls)

"""DeepSpeed's own layers of experts (`deepspeed.moe`), shared by ranks, through other world sizes and lost ranks; the
oracles are DeepSpeed without the platform, and one rank with all experts."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import forks
import native_moe_plain
import pytest
import torch
from crew import Crew
from moe_model import EXPERTS, Mixture
from native_moe import configured
from test_oracle import Run, _assert_ended, _assert_every_sample_once, _distance, damage_newest

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.samples import SampleOrder
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

# Two epochs of 37 samples in steps of ten: a step reaches over the epoch's end, and the last one is short.
BATCH, LAST_STEP = BatchSettings(epochs=2), 8
# Gradients are added up in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
# Below the gradient's norm in every step.
CLIPPING = 0.3
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "anomalies": AnomalySettings(policy="stop")}


def through(
    crew: Crew,
    url: Path,
    config: Mapping[str, Any],
    parts: Sequence[tuple[Sequence[int], int, int | None]],
    last_step: int = LAST_STEP,
) -> Run:
    """A run in generations of these members, so many of which share experts, each up to its step (None: the end). With
    `in_loop` functions stay, but those that stand by over an epoch's end."""
    store, generations, checkpoint = CheckpointStore(str(url), "run"), [], None
    sizes = tuple(sorted({ep for _, ep, _ in parts}))
    more = {**MORE, "ep_sizes": sizes if len(sizes) > 1 else ()}
    for who, ep, end_at in parts:
        outcomes = crew.run(
            who, "native_moe.train", {**config, "url": str(url)}, end_at=end_at, checkpoint=checkpoint, ep=ep, **more
        )
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or last_step)
        assert all(outcome.clean for outcome in outcomes)
        assert cells.left(crew) <= {cells.STOOD_BY}
        checkpoint = store.list()[0].id
        generations.append(outcomes)
    return Run(url, generations)


# Four micro-batches in every step: DeepSpeed alone takes whole ones only.
EVEN: dict[str, Any] = {
    "size": 36,
    "native": {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3},
    "schedule": False,
}
WORLDS: list[tuple[Sequence[int], int, int | None]] = [
    ((0, 1, 2, 3), 2, 2), ((2, 0), 2, 3), ((3, 1, 2), 1, 4), ((1, 3, 0, 2), 4, 5), ((1, 2, 3, 0), 2, None)
]  # fmt: skip


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_equals_deepspeed_alone(crew: Crew, tmp_path: Path, stage: int) -> None:
    """Which tokens are dropped, gates' noise and auxiliary losses are a micro-batch's, whoever shares the experts."""
    config = {"stage": stage, "clipping": CLIPPING, **EVEN}
    moved = through(crew, tmp_path / "moved", config, WORLDS, last_step=6)
    plan = {"config": configured(config), "seed": 0, "indices": SampleOrder(EVEN["size"]).indices(0, 2 * EVEN["size"])}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    processes = [forks.context().Process(target=native_moe_plain.train, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    plain = [torch.load(tmp_path / f"trained-{rank}.pt") for rank in range(2)]
    losses = {f"loss {step}": torch.tensor(loss) for step, loss in enumerate(plain[0]["losses"], 1)}
    assert _distance(losses, moved.losses) <= ALLOWED
    for rank in range(2):
        for name, value in plain[rank]["weights"].items():
            saved = moved.state.get(f"master/{of_all(name, rank)}", moved.state.get(f"param/{name}"))
            assert torch.allclose(value.flatten().double(), saved, atol=ALLOWED), (rank, name)


def of_all(name: str, rank: int) -> str:
    """The name among all experts of what the second of two ranks calls `name`."""
    return re.sub(r"(?<=deepspeed_experts\.)\d+", lambda found: str(int(found[0]) + rank * EXPERTS // 2), name)


SHORT = {"native": {"train_micro_batch_size_per_gpu": 3}}
CASES = [
    pytest.param({"stage": 1, "groups": "plain", **SHORT}, id="stage1-plain-groups"),
    pytest.param(
        {"stage": 2, "groups": "by size", "model": {"dropout": 0.2, "drop_tokens": False}, "schedule": False,
         "own schedule": True, "zero": {"round_robin_gradients": True}, **SHORT},
        id="stage2-all-tokens-dropout",
    ),
    pytest.param(
        {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}, "top": {"zero_force_ds_cpu_optimizer": False}},
        id="stage2-offload",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"stage": 1, "named optimizer": True, "model": {"k": 3, "use_residual": False}, **SHORT},
        id="stage1-optimizer-of-the-configuration",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", CASES)
def test_a_run_with_shared_experts_equals_one_rank_with_all(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    """A step's last micro-batch has one sample, and so fewer places for tokens than another rank's has."""
    config = {**config, "clipping": CLIPPING, "in_loop": True}
    whole = through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    moved = through(crew, tmp_path / "moved", config, WORLDS)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, moved.state) <= ALLOWED
    _assert_every_sample_once(moved.outcomes)
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    assert min(norms.values()) > CLIPPING, "gradients were clipped"
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "of all experts, once"


@pytest.mark.slow
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 2, "dtype": "bf16"}
    still = through(crew, tmp_path / "still", config, [((0, 1, 2, 3), 2, None)])
    moved = through(crew, tmp_path / "moved", config, [((0, 1, 2, 3), 2, 3), ((2, 0), 2, None)])
    assert _distance(still.losses, moved.losses) <= 2e-2


def test_a_rank_is_lost_and_the_run_continues(crew: Crew, tmp_path: Path) -> None:
    """Rank 1 is killed; rank 2 waits for rank 3 in a layer of experts, and both are released. Rank 2 goes on in its
    loop with all experts, and then with half of them."""
    config = {"stage": 2, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {**MORE, "checkpoint_every_steps": 1, "ep": 2, "ep_sizes": (1, 2)}
    crew.begin([0, 1, 2, 3], "native_moe.train", {**config, "victims": [0, 1, 3], "at": 4}, **more)
    for number in range(4):
        crew.reached(number, "there")
    crew.reached(0, "committed step 4")
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    crew.in_collective(2)
    crew.abort(2, "rank 1 was lost")
    assert crew.outcome(2).result.kind in ("ended", "collective_failed")
    for number in (0, 1, 3):
        crew.replace(number)
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == 4

    shrunk = crew.run([3, 2], "native_moe.train", config, checkpoint=store.list()[0].id, end_at=6, **{**more, "ep": 1})
    _assert_ended(shrunk, "ended", 6)
    grown = crew.run([0, 1, 2, 3], "native_moe.train", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert not cells.left(crew)

    whole = through(crew, tmp_path / "whole", {"stage": 2}, [((0,), 1, None)])
    moved = Run(tmp_path / "moved", [shrunk, grown])
    expected = {name: loss for name, loss in whole.losses.items() if int(name.removeprefix("loss ")) > 4}
    assert _distance(expected, moved.losses) <= ALLOWED
    assert _distance(whole.state, {key: moved.state[key] for key in whole.state}) <= ALLOWED


LAST_EXPERT = "layers.1.deepspeed_moe.experts.deepspeed_experts.1.up.weight"


def test_copies_of_experts_that_drift_apart_are_told_on_all_ranks(crew: Crew, tmp_path: Path) -> None:
    """Rank 3 has the experts 2 and 3 of all."""
    config = {"stage": 2, "drifts after": 1, "drifts": LAST_EXPERT, "victim": 3, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "native_moe.train", config, end_at=2, ep=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    said = [outcome.result.message for outcome in outcomes]
    for rank in (1, 3):
        assert f"weights of {LAST_EXPERT.replace('experts.1', 'experts.3')} on rank" in said[rank]
    for rank in (0, 2):
        assert "the ranks with expert coordinate 1" in said[rank]
    assert not CheckpointStore(str(tmp_path), "run").list()


def test_a_copy_of_dense_weights_that_drifts_apart_is_told(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "drifts after": 1, "drifts": "head.weight", "victim": 3, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "native_moe.train", config, end_at=2, ep=4, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    for outcome in outcomes:
        assert "weights of head.weight on rank 3" in outcome.result.message


def test_what_is_damaged_in_one_ranks_experts_is_restored_on_no_rank(crew: Crew, tmp_path: Path) -> None:
    through(crew, tmp_path, {"stage": 1}, [(range(4), 2, 3)])
    newest = damage_newest(tmp_path)
    config = {"stage": 1, "url": str(tmp_path)}
    outcomes = crew.run(range(2), "native_moe.train", config, checkpoint=newest, ep=2, **MORE)
    assert all("is not what was saved" in outcome.result.message for outcome in outcomes)
    assert all(outcome.result.step == 3 for outcome in outcomes), "no step was made"


def test_weights_of_all_experts_go_out_and_into_other_shares(crew: Crew, tmp_path: Path) -> None:
    first = through(crew, tmp_path / "first", {"stage": 1}, [(range(4), 4, 3)])
    (newest, *_) = CheckpointStore(str(tmp_path / "first"), "run").list()
    source = f"{tmp_path / 'first'}/run/checkpoints/{newest.id}"
    exported = torch.load(elastic.export(source, tmp_path / "out", to="torch") / "model.pt", weights_only=True)
    Mixture().load_state_dict(exported)  # with all experts, under DeepSpeed's own names
    for key, value in first.state.items():
        kind, name = key.split("/", 1)
        if kind == "master":
            assert torch.equal(exported[name].flatten().double(), value), name

    config = {"stage": 2, "weights": source, "drawn": False}
    one = through(crew, tmp_path / "one", config, [((0,), 1, None)])
    two = through(crew, tmp_path / "two", config, [(range(4), 2, None)])
    assert _distance(one.losses, two.losses) <= ALLOWED
    assert float(one.losses["loss 1"]) < float(first.losses["loss 1"]), "it begins with what the first has learnt"


@pytest.mark.parametrize(
    ("config", "ep", "said"),
    [
        ({"model": {"ep_size": 2}}, 1, "MoE was given ep_size=2, and the job's mesh says ep: 1; leave ep_size out"),
        ({"model": {"ep_size": 1}}, 2, "MoE was given ep_size=1, and the job's mesh says ep: 2; leave ep_size out"),
        ({"model": {"experts": 3}}, 2, "num_experts=3, and the job's mesh says ep: 2, no divisor"),
        ({"stage": 3}, 1, "is for ZeRO stages 1 and 2, and zero_optimization.stage is 3"),
        ({"stage": 0}, 1, "is for ZeRO stages 1 and 2, and zero_optimization.stage is 0"),
        ({"model": {"counting": True}}, 2, "has buffers, which would be saved of rank 0's experts only (passes)"),
        ({"model": {"in_experts": 0.1}}, 2, "the experts of the MoE layer 'layers.0' draw random numbers"),
        ({"model": {"in_experts": 0.1}, "native": {"expert_parallel": {"enabled": True}}}, 1, "draw random numbers"),
        ({"native": {"expert_parallel": {"preset_model": "mixtral"}}}, 2, "expert_parallel.preset_model is for AutoEP"),
        ({"groups": "plain", "own schedule": True}, 2, "LinearLR was made before the experts had parameter groups"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    crew: Crew, tmp_path: Path, config: dict[str, Any], ep: int, said: str
) -> None:
    outcomes = crew.run(
        range(2), "native_moe.train", {"stage": 1, "schedule": False, "url": str(tmp_path), **config}, ep=ep, **MORE
    )
    for outcome in outcomes:
        assert outcome.result.kind == "usage_error"
        assert said in outcome.result.message


def test_dropout_of_experts_that_nobody_shares_is_exact(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "model": {"in_experts": 0.2, "counting": True}}
    one = through(crew, tmp_path / "one", config, [((0,), 1, None)])
    two = through(crew, tmp_path / "two", config, [((0, 1, 2), 1, 3), ((2, 1), 1, None)])
    assert _distance(one.losses, two.losses) <= ALLOWED


def test_exchanges_are_in_the_ledger(crew: Crew, tmp_path: Path) -> None:
    run = through(crew, tmp_path, {"stage": 1}, [(range(4), 2, 2)])
    (report,) = [report for report in run.outcomes[0].reports if report.step == 2]
    calls: Counter[tuple[str, str]] = Counter()
    for use in report.collectives:
        calls[use.op, use.axis] += use.calls
    # 2 micro-batches, two layers: how many places, tokens there and back, and both ways of their gradients.
    assert calls["all_reduce", "ep"] == 2 * 2
    assert calls["all_to_all_single", "ep"] == 2 * 2 * 4

"""Ranks that share experts (AutoEP), through other world sizes and lost ranks; the oracles are one rank with all
experts, and plain torch."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import Part
from crew import Crew
from expert_model import EPS, EXPERTS, Balance, MixtureOfExperts
from layered_model import text
from test_oracle import Run, _assert_ended, _assert_every_sample_once, _distance, damage_newest

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

# Two epochs of 37 samples in steps of ten: a step reaches over the epoch's end, and the last one is short.
BATCH, LAST_STEP = BatchSettings(epochs=2), 8
# Gradients are added up in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
MLP = "model.layers.0.mlp"
# Below the gradient's norm in every step.
CLIPPING = 0.3
# There DeepSpeed's own clipping is refused.
UNCLIPPED: dict[str, Any] = {"stage": 0, "clipping": 0}


def of_stage(config: Mapping[str, Any]) -> str:
    return f"stage{config['stage']}"


MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "anomalies": AnomalySettings(policy="stop")}


def through(
    crew: Crew,
    url: Path,
    config: Mapping[str, Any],
    parts: Sequence[tuple[Sequence[int], int, int | None]],
    **more: Any,
) -> Run:
    """A run in generations of these members, so many of which share experts, each up to its step (None: the end)."""
    store, generations, checkpoint = CheckpointStore(str(url), "run"), [], None
    for (who, ep, end_at), stage in zip(parts, config.get("stages", [config["stage"]] * len(parts)), strict=False):
        outcomes = crew.run(
            who, "expert_parallel.train", {**config, "stage": stage, "url": str(url)}, end_at=end_at,
            checkpoint=checkpoint, ep=ep,
            **{**MORE, **more},
        )  # fmt: skip
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        checkpoint = store.list()[0].id
        generations.append(outcomes)
    run = Run(url, generations)
    # Of one rank's own passes, and meant to depend on the world.
    run.state = {key: value for key, value in run.state.items() if "tokens_per_expert" not in key}
    return run


CASES = [
    # The others are of the same stages, each with something besides.
    *(pytest.param({"stage": stage}, id=f"stage{stage}", marks=pytest.mark.slow) for stage in (1, 2, 3)),
    pytest.param(
        {"stage": 2, "dropout": 0.2, "zero": {"round_robin_gradients": True}}, id="stage2-round-robin-dropout"
    ),
    pytest.param({"stage": 3, "dropout": 0.2, "zero": {"sub_group_size": 300}}, id="stage3-sub-groups-dropout"),
    pytest.param({"stage": 1, "schedule": False, "own schedule": "to be made"}, id="stage1-own-schedule"),
    pytest.param(
        {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}, "top": {"zero_force_ds_cpu_optimizer": False}},
        id="stage2-offload",
    ),
    *(pytest.param(each, id=f"stage{each['stage']}-offload", marks=pytest.mark.slow) for each in cells.offloaded(1, 3)),
    *(
        pytest.param({"stage": stage, "compiled": True}, id=f"stage{stage}-compiled", marks=pytest.mark.slow)
        for stage in (1, 2, 3)
    ),
    pytest.param({"stage": 1, "named optimizer": True}, id="stage1-optimizer-of-the-configuration"),
    pytest.param({**UNCLIPPED, "dropout": 0.2}, id="stage0-dropout"),
    pytest.param({**UNCLIPPED, "stages": (0, 2, 0)}, id="stages-0-2-0"),
    pytest.param({"stage": 1, "in_loop": True}, id="stage1-in-loop"),
    pytest.param({"stage": 3, "dropout": 0.2, "in_loop": True}, id="stage3-dropout-in-loop", marks=pytest.mark.slow),
    pytest.param({**UNCLIPPED, "in_loop": True}, id="stage0-in-loop", marks=pytest.mark.slow),
    pytest.param({"stage": 2, "compiled": True, "in_loop": True}, id="stage2-compiled-in-loop", marks=pytest.mark.slow),
    # Half of the workers have nothing to compute in these layers.
    pytest.param({**UNCLIPPED, "unchosen": True}, id="stage0-unchosen"),
    pytest.param({"stage": 2, "unchosen": True}, id="stage2-unchosen"),
    pytest.param({**UNCLIPPED, "sgd": True, "own schedule": "to be made", "schedule": False}, id="stage0-sgd"),
]


@pytest.mark.parametrize("config", CASES)
def test_a_run_with_shared_experts_equals_one_rank_with_all(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    config = {"clipping": CLIPPING, **config}
    whole = through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    moved = through(
        crew, tmp_path / "moved", config, [((0, 1, 2, 3), 2, 3), ((2, 0), 2, 5), ((1, 3, 0, 2), 2, None)]
    )  # fmt: skip
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, moved.state) <= ALLOWED
    _assert_every_sample_once(moved.outcomes)
    assert [dict(outcome.told["coordinates"]) for outcome in moved.outcomes[-4:]] == [
        {"dp": rank, "sp": 0, "tp": 0, "ep": rank % 2, "pp": 0} for rank in range(4)
    ]
    if config.get("unchosen"):
        assert not whole.state[f"exp_avg/{MLP}.experts.w2"].view(EXPERTS, -1)[EXPERTS // 2 :].any()
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    assert min(norms.values()) > CLIPPING, "gradients were clipped"
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "of all experts, once"


def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path) -> None:
    """What the oracle above is worth."""
    whole = through(crew, tmp_path, {"stage": 1, "schedule": False, "clipping": CLIPPING}, [((0,), 1, None)])
    (outcome,) = whole.outcomes
    losses, weights = plain_torch(outcome.indices)
    assert {f"loss {step}": loss for step, loss in enumerate(losses, 1)} == pytest.approx(
        {name: float(loss) for name, loss in whole.losses.items()}, abs=ALLOWED
    )
    for name, value in weights.items():
        assert torch.allclose(outcome.told["weights"][name], value, atol=ALLOWED), name


def plain_torch(indices: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps of ten samples, and a last one of the rest, in micro-batches of two; the gradient is clipped. Experts under
    AutoEP's names."""
    torch.manual_seed(3)
    model = MixtureOfExperts()
    balance = Balance(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02, eps=EPS), []
    for begin in range(0, len(indices), 10):
        step = indices[begin : begin + 10]
        optimizer.zero_grad()
        losses.append(0.0)
        for first in range(0, len(step), 2):
            samples = [text(index) for index in step[first : first + 2]]
            tokens, labels = (torch.stack(part) for part in zip(*samples, strict=True))
            loss = balance.loss(model(tokens), labels) * len(samples) / len(step)
            loss.backward()
            losses[-1] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, CLIPPING)
        optimizer.step()
    return losses, dict(_packed(model))


def _packed(model: torch.nn.Module) -> Any:
    for name, value in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.detach().chunk(2, dim=1)
            yield name.replace("gate_up_proj", "w1"), gate
            yield name.replace("gate_up_proj", "w3"), up
        else:
            yield name.replace("experts.down_proj", "experts.w2").replace("mlp.gate", "mlp.router.gate"), value.detach()


SHARED = {"sequences": True, "clipping": CLIPPING}


@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 2}, {"stage": 3}, UNCLIPPED], ids=of_stage)
def test_experts_are_shared_beside_sequences(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    """Tokens travel to workers with the same part of their sequences."""
    config = {**SHARED, **config}
    whole = through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    parts = [((0, 1, 2, 3), 2, 3), ((2, 0), 1, 5), ((1, 3, 0, 2), 2, None)]
    moved = through(crew, tmp_path / "moved", config, parts, ep_sizes=(1, 2), sp=2)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, moved.state) <= ALLOWED
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    for rank, outcome in enumerate(moved.outcomes[-4:]):
        assert [outcome.told["coordinates"][axis] for axis in ("sp", "ep")] == [rank % 2, rank // 2]
        own = whole.outcomes[0].told["weights"][f"{MLP}.experts.w2"][2 * (rank // 2) :][:2]
        assert torch.allclose(outcome.told["weights"][f"{MLP}.experts.w2"], own, atol=ALLOWED), "as they say"
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"stage": 2}, {"stage": 3}, UNCLIPPED], ids=of_stage)
def test_several_cells_share_experts_beside_sequences(eight: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    config = {**SHARED, **config}
    whole = through(eight, tmp_path / "whole", config, [((0,), 1, None)], max_world_size=8)
    parts = [(range(8), 2, 3), ((5, 0, 6, 3), 2, 5), ((1, 7, 0, 2, 6, 5, 3, 4), 4, None)]
    moved = through(eight, tmp_path / "moved", config, parts, ep_sizes=(1, 2, 4), sp=2, max_world_size=8)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, moved.state) <= ALLOWED


@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 2}, {"stage": 3}], ids=of_stage)
def test_experts_are_shared_beside_layers(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    """Of two lanes each has every second block of experts. At the end one rank has all of them, and whole layers."""
    config = {"clipping": CLIPPING, **config}
    whole = through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    parts: list[Part] = [((0, 1, 2, 3), 3, {"ep": 2}), ((2, 0), 5), ((1, 3, 0, 2), 7, {"ep": 2})]
    moved = beside_layers(crew, tmp_path / "moved", config, parts, ep_sizes=(1, 2))
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, {key: moved.state[key] for key in whole.state}) <= ALLOWED
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "of all experts, once"


def beside_layers(crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Part], **more: Any) -> Run:
    """Two ranks share each layer, before the last step, which one does alone."""
    config, more = {**config, "layers": True, "url": str(url)}, {**MORE, "tp_sizes": (1, 2), **more}
    generations = cells.through(crew, url, "expert_parallel.train", config, parts, tp=2, **more)
    checkpoint = CheckpointStore(str(url), "run").list()[0].id
    generations.append(crew.run([3], "expert_parallel.train", config, checkpoint=checkpoint, **more))
    return Run(url, generations)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 2}, {"stage": 3}], ids=of_stage)
def test_several_cells_share_experts_beside_layers(eight: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    """Two ranks have the same experts and the same slices; and with `ep` 1 four."""
    config = {"clipping": CLIPPING, "dropout": 0.2, **config}
    whole = through(eight, tmp_path / "whole", config, [((0,), 1, None)], max_world_size=8)
    parts: list[Part] = [(range(8), 3, {"ep": 2}), ((5, 0, 6, 3, 1, 2), 5), ((1, 7, 0, 2, 6, 5, 3, 4), 7, {"ep": 2})]
    moved = beside_layers(eight, tmp_path / "moved", config, parts, ep_sizes=(1, 2), max_world_size=8)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, {key: moved.state[key] for key in whole.state}) <= ALLOWED


@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 3}, UNCLIPPED], ids=of_stage)
def test_the_number_of_ranks_that_share_experts_may_change(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    """A rank's experts are an interval of the whole: what others held is read as at another number of ranks."""
    config = {"clipping": CLIPPING, **config}
    whole = through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    parts = [((0, 1, 2, 3), 2, 2), ((3, 1, 2, 0), 4, 4), ((0, 1, 2), 1, 6), ((2, 1), 2, None)]
    moved = through(crew, tmp_path / "moved", config, parts)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state, moved.state) <= ALLOWED


@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_of_many_parameters_are_in_as_many_groups_at_every_ep(crew: Crew, tmp_path: Path, named: bool) -> None:
    """Above so many parameters DeepSpeed begins another group; a rank has fewer of them the more ranks share them."""
    config = {"stage": 2, "parameters of a group": 300, "named optimizer": named, "schedule": named}
    through(crew, tmp_path / "experts", config, [(range(4), 4, 2), (range(2), 1, None)], ep_sizes=(1, 4))
    beside_layers(crew, tmp_path / "layers", config, [(range(4), 2)])


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)] + [3])
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "dtype": "bf16"}
    still = through(crew, tmp_path / "still", config, [((0, 1, 2, 3), 2, None)])
    moved = through(crew, tmp_path / "moved", config, [((0, 1, 2, 3), 2, 3), ((2, 0), 2, None)])
    assert _distance(still.losses, moved.losses) <= 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_beside_layers_is_within_its_rounding(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "dtype": "bf16"}
    still = through(crew, tmp_path / "still", config, [((0,), 1, None)])
    moved = beside_layers(
        crew, tmp_path / "moved", config, [((0, 1, 2, 3), 3, {"ep": 2}), ((2, 0), 7)], ep_sizes=(1, 2)
    )
    assert _distance(still.losses, moved.losses) <= 2e-2


@pytest.mark.parametrize(
    ("own", "fewer"),
    [
        ({"stage": 1}, {"ep": 2}),
        (UNCLIPPED, {"ep": 2}),
        ({"stage": 2, "sequences": True}, {"ep": 1, "ep_sizes": (1, 2), "sp": 2}),
        ({"stage": 2, "layers": True}, {"ep": 1, "ep_sizes": (1, 2), "tp": 2, "tp_sizes": (1, 2)}),
    ],
)
def test_a_rank_without_a_dead_peer_is_released_and_the_run_continues(
    crew: Crew, tmp_path: Path, own: dict[str, Any], fewer: dict[str, Any]
) -> None:
    """Rank 1 is killed. In the layer of experts rank 2 waits for rank 3, or with sequences for rank 0, which compute:
    nothing but an abort would end that."""
    config = {**own, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {**MORE, "checkpoint_every_steps": 1, **fewer, "ep": 2}
    crew.begin([0, 1, 2, 3], "expert_parallel.train", {**config, "victims": [0, 1, 3], "at": 4}, **more)
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

    checkpoint = store.list()[0].id
    shrunk = crew.run([3, 2], "expert_parallel.train", config, checkpoint=checkpoint, end_at=6, **{**more, **fewer})
    _assert_ended(shrunk, "ended", 6)
    grown = crew.run(range(4), "expert_parallel.train", config, checkpoint=store.list()[0].id, end_at=7, **more)
    # Alone a rank has all there is.
    alone = {**more, "ep": 1, "ep_sizes": (1, 2), "sp": 1, "tp": 1}
    last = crew.run([1], "expert_parallel.train", config, checkpoint=store.list()[0].id, **alone)
    _assert_ended(last, "finished", LAST_STEP)
    assert not cells.left(crew)

    whole = through(crew, tmp_path / "whole", own, [((0,), 1, None)])
    moved = Run(tmp_path / "moved", [shrunk, grown, last])
    expected = {name: loss for name, loss in whole.losses.items() if int(name.removeprefix("loss ")) > 4}
    assert _distance(expected, moved.losses) <= ALLOWED
    assert _distance(whole.state, {key: moved.state[key] for key in whole.state}) <= ALLOWED


@pytest.mark.parametrize(
    ("victim", "own", "what"),
    [
        (1, {"stage": 2}, "weights of "),
        (3, {"stage": 2}, "weights of "),
        (1, UNCLIPPED, "master/"),
        (3, {**UNCLIPPED, "kind": "exp_avg"}, "exp_avg/"),
        (2, {"stage": 1, "sequences": True}, "weights of "),
        (3, {**UNCLIPPED, "sequences": True, "kind": "exp_avg"}, "exp_avg/"),
        (3, {"stage": 2, "layers": True}, "weights of "),
    ],
)
def test_copies_of_experts_that_drift_apart_are_told_on_all_ranks(
    crew: Crew, tmp_path: Path, victim: int, own: dict[str, Any], what: str
) -> None:
    config = {**own, "drifts after": 1, "drifts": f"{MLP}.experts.w2", "victim": victim, "url": str(tmp_path)}
    sp, ep, tp = 2 if own.get("sequences") else 1, *((1, 2) if own.get("layers") else (2, 1))
    outcomes = crew.run(range(4), "expert_parallel.train", config, end_at=2, ep=ep, sp=sp, tp=tp, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    said = [outcome.result.message for outcome in outcomes]
    alike = [rank for rank in range(4) if rank // sp % 2 == 1]
    for rank in alike:
        assert f"{what}{MLP}.experts.w2 on rank" in said[rank]
    assert any(f"on rank {rank}" in said[victim] for rank in alike)
    for rank in {*range(4)} - {*alike}:
        assert "the ranks with expert coordinate 1" in said[rank]
    assert not CheckpointStore(str(tmp_path), "run").list()


@pytest.mark.parametrize(
    ("own", "what", "mesh"),
    [
        ({"stage": 1}, "weights of ", {"ep": 4}),
        (UNCLIPPED, "master/", {"ep": 4}),
        ({"stage": 2, "layers": True}, "weights of ", {"ep": 2, "tp": 2}),
    ],
)
def test_a_copy_of_dense_weights_that_drifts_apart_is_told_whatever_experts_the_ranks_have(
    crew: Crew, tmp_path: Path, own: dict[str, Any], what: str, mesh: dict[str, int]
) -> None:
    config = {**own, "drifts after": 1, "drifts": f"{MLP}.router.gate.weight", "victim": 3, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "expert_parallel.train", config, end_at=2, **mesh, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    for outcome in outcomes:
        assert f"{what}{MLP}.router.gate.weight on rank 3" in outcome.result.message


def test_a_slice_that_drifts_apart_is_told_beside_experts(crew: Crew, tmp_path: Path) -> None:
    """In its lane, whose ranks have different experts."""
    name = "model.layers.0.self_attn.q_proj.weight"
    config = {"stage": 1, "layers": True, "drifts after": 1, "drifts": name, "victim": 3, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "expert_parallel.train", config, end_at=2, ep=2, tp=2, **MORE)
    said = [outcome.result.message for outcome in outcomes]
    assert all(f"weights of {name} on rank" in said[rank] for rank in (1, 3))
    assert all("the ranks with tensor coordinate 1" in said[rank] for rank in (0, 2))


@pytest.mark.parametrize("policy", ["rollback", "skip"])
def test_a_non_finite_gradient_of_one_ranks_experts_is_found_by_all(crew: Crew, tmp_path: Path, policy: Any) -> None:
    config = {**UNCLIPPED, "nan at": 2, "victim": 2, "url": str(tmp_path)}
    more = {**MORE, "anomalies": AnomalySettings(policy), "checkpoint_every_steps": 1}
    outcomes = crew.run(range(4), "expert_parallel.train", config, ep=4, **more)
    if policy == "rollback":
        assert [(outcome.result.kind, outcome.result.step) for outcome in outcomes] == [("anomaly", 2)] * 4
    else:
        _assert_ended(outcomes, "finished", LAST_STEP)
        assert {report.anomaly for outcome in outcomes for report in outcome.reports if report.step == 3} == {
            "the gradient is not finite"
        }


@pytest.mark.parametrize("config", [{"stage": 1}, UNCLIPPED], ids=of_stage)
def test_what_is_damaged_in_one_ranks_experts_is_restored_on_no_rank(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    through(crew, tmp_path, config, [(range(4), 2, 3)])
    newest = damage_newest(tmp_path)
    config = {**config, "url": str(tmp_path)}
    outcomes = crew.run(range(2), "expert_parallel.train", config, checkpoint=newest, ep=2, **MORE)
    assert all("is not what was saved" in outcome.result.message for outcome in outcomes)
    assert all(outcome.result.step == 3 for outcome in outcomes), "no step was made"


def test_a_run_begins_with_the_weights_of_a_checkpoint_of_other_shares(crew: Crew, tmp_path: Path) -> None:
    first = through(crew, tmp_path / "first", {"stage": 1}, [(range(4), 4, 3)])
    (newest, *_) = CheckpointStore(str(tmp_path / "first"), "run").list()
    source = f"{tmp_path / 'first'}/run/checkpoints/{newest.id}"
    config = {"stage": 3, "weights": source, "seeded by": "dp"}
    one = through(crew, tmp_path / "one", config, [((0,), 1, None)])
    two = through(crew, tmp_path / "two", config, [(range(4), 2, None)])
    assert _distance(one.losses, two.losses) <= ALLOWED
    assert _distance(one.state, two.state) <= ALLOWED
    assert float(one.losses["loss 1"]) < float(first.losses["loss 1"]), "it begins with what the first has learnt"
    exported = torch.load(elastic.export(source, tmp_path / "out", to="torch") / "model.pt", weights_only=True)
    assert exported["model.layers.1.mlp.experts.w1"].shape == (4, 6, 16), "of all experts"
    for key, value in first.state.items():
        kind, name = key.split("/", 1)
        if kind == "master":
            assert torch.equal(exported[name].flatten().double(), value), name


def test_ranks_that_have_built_other_models_are_refused(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "url": str(tmp_path), "seeded by": "dp"}
    outcomes = crew.run(range(2), "expert_parallel.train", config, ep=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    said = "the ranks that share layers or experts have different values of model.embed.weight"
    assert all(said in outcome.result.message for outcome in outcomes)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"expert_parallel": {"top_k": 9}}, "AutoEP refuses this model or its configuration: top_k=9"),
        ({"frozen": True}, "experts.w2 is frozen (1 such parameters)"),
        ({"own schedule": "made"}, "the learning-rate scheduler LinearLR was made before AutoEP"),
    ],
)
def test_what_cannot_work_is_refused_by_name(crew: Crew, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    (outcome,) = crew.run([0], "expert_parallel.train", {"stage": 1, "url": str(tmp_path), **config}, **MORE)
    assert outcome.result.kind == "usage_error"
    assert said in outcome.result.message


def test_exchanges_are_in_the_ledger(crew: Crew, tmp_path: Path) -> None:
    run = through(crew, tmp_path, {"stage": 1}, [(range(4), 2, None)])
    (report,) = [report for report in run.outcomes[0].reports if report.step == 2]
    calls: Counter[tuple[str, str]] = Counter()
    for use in report.collectives:
        calls[use.op, use.axis] += use.calls
    # 2 micro-batches, two layers: counts, tokens there and back, and both ways of their gradients.
    assert calls["all_to_all_single", "ep"] >= 2 * 2 * 5
    assert calls["all_reduce", "dp"]

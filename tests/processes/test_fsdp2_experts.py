"""Experts that ranks share with FSDP2: models of transformers, and layers of a script's own; other world sizes and
lost ranks.

The oracles are one rank with all experts, and plain torch. Layouts, and what is refused before anything is sharded, are
in tests/tensors/test_fsdp2_experts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import (
    AT,
    LAST_STEP,
    MOVED,
    WHOLE,
    Part,
    Run,
    assert_every_sample_once,
    assert_within_rounding,
    kill_a_rank,
    of_run,
    with_a_rank_killed,
)
from crew import Crew
from expert_model import EPS, Balance
from layered_model import EVEN, text
from routed_model import RoutedMixture
from test_huggingface import BALANCED, TIED
from test_huggingface import through as through_hugging_face
from test_oracle import _assert_ended, _distance

import elastic
from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

# Gradients are added up in another order, and Adam divides by what may be small. In fp64 the losses' weights are left,
# which are fp32.
ALLOWED, EXACT = 1e-5, 1e-7
SLOW = pytest.mark.slow
FSDP2: dict[str, Any] = {"engine": "fsdp2", "eps": EPS}
DOUBLE: dict[str, Any] = {**FSDP2, "precision": "float64"}
# Below the gradient's norm in every step.
CLIPPING = 0.3
MIXTRAL = {"family": "Mixtral", "model": {"num_local_experts": 4, **TIED, **BALANCED}}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1, **BALANCED}


def through(crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Part], **spec: Any) -> Run:
    tp = {**spec, **(parts[-1][2] if len(parts[-1]) == 3 else {})}.get("tp", 1)
    return Run(url, cells.through(crew, url, "routed.train", config, parts, **spec), tp)


def assert_equal(whole: Run, moved: Run, allowed: float = EXACT) -> None:
    """Losses, gradient norms and weights, exactly."""
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= allowed
    assert_every_sample_once(moved)
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=10 * allowed), "of all experts, once"


BESIDE_LAYERS = {"ep": 2, "ep_sizes": (1, 2), "tp": 2}


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        pytest.param(MIXTRAL, {"ep": 2}, id="mixtral-tied-balanced", marks=SLOW),
        pytest.param({**MIXTRAL, "in_loop": True}, BESIDE_LAYERS, id="mixtral-layers"),
        pytest.param({"family": "Qwen3Moe", "model": QWEN, "in_loop": True}, {"ep": 2}, id="qwen3-balanced-in-loop"),
        pytest.param({"family": "Qwen3Moe", "model": QWEN}, BESIDE_LAYERS, id="qwen3-layers", marks=SLOW),
        # Experts one by one, in fp64.
        pytest.param(
            {
                "family": "Mixtral",
                "model": {**MIXTRAL["model"], "experts_implementation": "eager"},
                "precision": "float64",
            },
            BESIDE_LAYERS,
            id="mixtral-fp64",
            marks=SLOW,
        ),
    ],
)
def test_models_of_transformers_equal_one_rank_with_all_experts(
    crew: Crew, tmp_path: Path, config: dict[str, Any], mesh: dict[str, Any]
) -> None:
    """Losses have the one that spreads tokens over experts in them, which is of a rank's own micro-batch."""
    config, allowed = {**FSDP2, **config}, EXACT if "precision" in config else ALLOWED
    whole = through_hugging_face(crew, tmp_path / "whole", {**config, "in_loop": False}, WHOLE)
    first, (two, end_at), last = MOVED
    parts = (first, (two, end_at, {"ep": 2 // mesh.get("tp", 1)}), last)
    moved = through_hugging_face(crew, tmp_path / "moved", config, parts, **mesh)
    assert [outcome.told["coordinates"]["ep"] for outcome in moved.outcomes[-4:]] == (
        [0, 0, 1, 1] if "tp" in mesh else [0, 1, 0, 1]
    )
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= allowed
    assert_every_sample_once(moved)


# Members of one generation, how many of them share experts, and its last step.
OTHER_EP: Sequence[tuple[Sequence[int], int, int | None]] = (
    ((0, 1, 2, 3), 4, 2), ((3, 1, 2, 0), 2, 4), ((0, 1, 2), 1, 6), ((2, 1), 2, None),
)  # fmt: skip


@pytest.mark.parametrize(
    "in_loop", [pytest.param(False, id="called again", marks=SLOW), pytest.param(True, id="in the loop")]
)
def test_the_number_of_ranks_that_share_experts_may_change(crew: Crew, tmp_path: Path, in_loop: bool) -> None:
    """Exactly: every gradient, moment and weight of one rank in fp64, with clipping, dropout and a last short step."""
    config = {**DOUBLE, "dropout": 0.2}
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    assert min(norms.values()) > CLIPPING, "gradients were clipped"
    url, generations, checkpoint = tmp_path / "moved", [], None
    for who, ep, end_at in OTHER_EP:
        config = {**config, "url": str(url), "in_loop": in_loop}
        more = {**of_run(config), "ep": ep, "ep_sizes": (1, 2, 4)}
        outcomes = crew.run(who, "routed.train", config, end_at=end_at, checkpoint=checkpoint, **more)
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        checkpoint = CheckpointStore(str(url), "run").list()[0].id
        generations.append(outcomes)
    moved = Run(url, generations)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= EXACT
    assert_every_sample_once(moved)
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-6), "of all experts, once"
    # Each call counts anew and ends with its generation; member 2 is in the second, third and fourth.
    assert [outcome.told["starts"] for outcome in generations[-1]] == [1, 1] if in_loop else [4, 4]


LAYERS = {"tp": 2, "tp_sizes": (1, 2)}
OTHERS = [
    pytest.param(
        {"in_loop": True, "dropout": 0.2},
        [((0, 1, 2, 3), 2, {}), ((2, 0), 4, {"ep": 1}), ((3, 1, 2, 0), 6, {}), ((1, 2), None, {"tp": 1})],
        LAYERS,
        id="layers",
    ),
    pytest.param(
        {"recomputed": True, "dropout": 0.2, "frozen": True, "fsdp2": {"cpu_offload": True}, "in_loop": True},
        [((0, 1, 2, 3), 3, {}), ((2, 0), 5, {"ep": 1}), ((1, 3, 0, 2), None, {})],
        {"tp": 2},
        id="layers-recomputed",
        marks=SLOW,
    ),
    # Between submissions: of as many ranks that share each layer all have all experts of their own.
    pytest.param(
        {"in_loop": False},
        [((0, 1, 2, 3), 3, {}), ((2, 0), 5, {"ep": 1, "ep_sizes": ()}), ((1, 3, 0, 2), None, {})],
        {"tp": 2},
        id="resumed",
        marks=SLOW,
    ),
    pytest.param(
        {"sequences": True, "in_loop": True},
        [((0, 1, 2, 3), 3, {}), ((2, 0), 5, {"ep": 1}), ((1, 3, 0, 2), None, {})],
        {"sp": 2},
        id="sequences",
    ),
]


@pytest.mark.parametrize(("way", "parts", "mesh"), OTHERS)
def test_experts_are_shared_beside_layers_and_sequences(
    crew: Crew, tmp_path: Path, way: dict[str, Any], parts: Sequence[Part], mesh: dict[str, Any]
) -> None:
    plain = {key: value for key, value in way.items() if key in ("dropout", "frozen", "sequences")}
    whole = through(crew, tmp_path / "whole", {**DOUBLE, **plain}, WHOLE)
    shared = {"ep": 2, "ep_sizes": (1, 2), **mesh}
    moved = through(crew, tmp_path / "moved", {**DOUBLE, **way}, [(*a, {**shared, **b}) for *a, b in parts])
    assert_equal(whole, moved)
    (report,) = [report for report in moved.outcomes[0].reports if report.step == 2]
    calls = {(use.op, use.axis) for use in report.collectives}
    assert ("all_to_all_single", "ep") in calls
    # Rows are divided among the workers of a cell.
    assert (("all_gather_into_tensor", "tp") in calls) == ("tp" in mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "sp": 2}])
def test_as_many_cells_as_have_the_same_experts(eight: Crew, tmp_path: Path, mesh: dict[str, Any]) -> None:
    """Eight workers: the experts twice among them, or shared by two cells beside both."""
    config = {**DOUBLE, "sequences": "sp" in mesh, "in_loop": True}
    whole = through(eight, tmp_path / "whole", {**config, "in_loop": False}, WHOLE)
    fewer = {"ep": 1 if "sp" in mesh else 2}
    parts: Sequence[Part] = ((range(8), 3), ((5, 0, 6, 3), 5, fewer), ((1, 7, 0, 2, 6, 5, 3, 4), None))
    assert_equal(whole, through(eight, tmp_path / "moved", config, parts, ep=2, ep_sizes=(1, 2), **mesh))


def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path) -> None:
    """What the oracle above is worth."""
    whole = through(crew, tmp_path, {**DOUBLE, "schedule": False}, WHOLE)
    (outcome,) = whole.outcomes
    losses, weights = plain_torch(outcome.indices)
    assert losses == pytest.approx([float(whole.losses[f"loss {step}"]) for step in range(1, LAST_STEP + 1)], abs=1e-6)
    for name, value in weights.items():
        assert torch.allclose(outcome.told["weights"][name], value, atol=EXACT), name


def plain_torch(indices: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps of ten samples, and a last one of the rest, in micro-batches of two; the gradient is clipped."""
    torch.manual_seed(3)
    model = RoutedMixture(**EVEN).double()
    balance, losses = Balance(model), []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=EPS)
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
    return losses, {name: value.detach() for name, value in model.named_parameters()}


# Each of the slow ones differs in one option from a way beside it.
WAYS = [
    pytest.param({"fsdp2": {"cpu_offload": True}}, id="offload", marks=SLOW),
    pytest.param({"fsdp2": {"shard": []}}, id="all else at once", marks=SLOW),
    pytest.param({"fsdp2": {"shard": ["Routed", "Linear"], "reshard_after_forward": False}}, id="kept", marks=SLOW),
    pytest.param({"recomputed": True, "dropout": 0.2, "frozen": True}, id="recomputed-frozen"),
]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_rank_with_all_experts(crew: Crew, tmp_path: Path, way: dict[str, Any]) -> None:
    plain = {key: value for key, value in way.items() if key in ("dropout", "frozen")}
    whole = through(crew, tmp_path / "whole", {**DOUBLE, **plain}, WHOLE)
    moved = through(crew, tmp_path / "moved", {**DOUBLE, **way, "in_loop": True}, MOVED, ep=2)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= EXACT


HALF = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
# So that a rounding is not the beginning of another run.
SLOWLY = 0.002


@pytest.mark.parametrize(
    ("way", "mesh"),
    [
        pytest.param({}, {"ep": 2, "ep_sizes": (1, 2)}, id="alone", marks=SLOW),
        pytest.param({}, BESIDE_LAYERS, id="layers"),
        pytest.param({"sequences": True}, {"ep": 2, "ep_sizes": (1, 2), "sp": 2}, id="sequences", marks=SLOW),
        pytest.param(MIXTRAL, BESIDE_LAYERS, id="mixtral-layers", marks=SLOW),
        # Of bf16 torch's grouped products take rows of whole 16 bytes.
        pytest.param(
            {"family": "Qwen3Moe", "model": {**QWEN, "moe_intermediate_size": 16}},
            BESIDE_LAYERS,
            id="qwen3-layers",
            marks=SLOW,
        ),
    ],
)
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path, way: dict[str, Any], mesh: dict[str, Any]) -> None:
    trained, config = through_hugging_face if "family" in way else through, {**FSDP2, **way, "rate": SLOWLY}
    exact = trained(crew, tmp_path / "exact", config, WHOLE)
    still = trained(crew, tmp_path / "still", {**config, "fsdp2": HALF}, WHOLE)
    first, (two, end_at), last = MOVED
    parts = (first, (two, end_at, {"ep": 1}), last)
    moved = trained(crew, tmp_path / "moved", {**config, "fsdp2": HALF, "in_loop": True}, parts, **mesh)
    assert_within_rounding(exact, still, moved)


@pytest.mark.parametrize(
    ("where", "mesh"),
    [
        *(pytest.param(where, {"ep": 2}, id=f"alone-{where}", marks=SLOW) for where in ("forward", "backward", "step")),
        pytest.param("backward", BESIDE_LAYERS, id="layers-backward"),
        pytest.param("forward", BESIDE_LAYERS, id="layers-forward", marks=SLOW),
        pytest.param("forward", {"ep": 2, "ep_sizes": (1, 2), "sp": 2}, id="sequences-forward", marks=SLOW),
    ],
)
def test_survivors_of_a_killed_rank_stay_in_their_loop(
    crew: Crew, tmp_path: Path, where: str, mesh: dict[str, Any]
) -> None:
    """One of the survivors has no group with the dead rank but the world's: with `ep` alone it waits in a layer for
    rank 3, which computes."""
    url, config = tmp_path / "moved", {**DOUBLE, "dropout": 0.0 if "sp" in mesh else 0.2, "sequences": "sp" in mesh}
    # The loss is of routers that the pass which was lost may not have come to.
    config["strict"] = where == "forward" or "tp" in mesh
    of_two = {"ep": 2 if mesh == {"ep": 2} else 1}
    moved = Run(url, with_a_rank_killed(crew, url, "routed.train", config, where, of_two, **mesh), mesh.get("tp", 1))
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    assert _distance(whole.after(AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= EXACT


def test_code_that_fails_on_outputs_of_an_abandoned_step_is_called_again(crew: Crew, tmp_path: Path) -> None:
    """No hook sees the router's logits, of which this function makes a part of its loss. Rank 0 shares its experts with
    the dead one, and learns of it in its forward pass, before anybody tells it."""
    config, more = {**DOUBLE, "in_loop": True, "url": str(tmp_path)}, {"checkpoint_every_steps": 1, "ep": 2}
    survivors = kill_a_rank(crew, "routed.train", config, "forward", **of_run(config), **more)
    assert crew.outcome(0).result.kind == "collective_failed"
    for number in survivors[1:]:
        crew.abort(number, "rank 1 was lost")
    for number in survivors:
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
        (why,) = [point for point in crew.members[number].points if point.startswith("left")]
        assert why.startswith("left: its code raised AssertionError () in a step that was abandoned")
    crew.replace(1)


def test_a_run_begins_with_the_weights_of_a_checkpoint_of_other_shares(crew: Crew, tmp_path: Path) -> None:
    first = through(crew, tmp_path / "first", FSDP2, [(range(4), 3)], ep=2, tp=2)
    (newest, *_) = CheckpointStore(str(tmp_path / "first"), "run").list()
    source = f"{tmp_path / 'first'}/run/checkpoints/{newest.id}"
    config = {**FSDP2, "weights": source}
    one = through(crew, tmp_path / "one", config, WHOLE)
    two = through(crew, tmp_path / "two", config, [(range(4), None)], ep=2)
    assert _distance(one.losses, two.losses) <= ALLOWED
    assert _distance(one.state(), two.state()) <= ALLOWED
    assert float(one.losses["loss 1"]) < float(first.losses["loss 1"]), "it begins with what the first has learnt"
    exported = torch.load(elastic.export(source, tmp_path / "out", to="torch") / "model.pt", weights_only=True)
    for key, value in first.state(one.shapes[0]).items():
        kind, name = key.split("/", 1)
        if kind == "master":
            assert torch.equal(exported[name].flatten().double(), value), name


def test_exchanges_are_in_the_ledger(crew: Crew, tmp_path: Path) -> None:
    run = through(crew, tmp_path, FSDP2, [(range(4), None)], ep=2)
    (report,) = [report for report in run.outcomes[0].reports if report.step == 2]
    calls: Counter[tuple[str, str]] = Counter()
    for use in report.collectives:
        calls[use.op, use.axis] += use.calls
    # 2 micro-batches; counts, and both ways of rows and of their gradients; and the weights of one of the two layers.
    assert calls["all_to_all_single", "ep"] == 2 * (2 * 5 + 2)
    assert calls["reduce_scatter_tensor", "edp"] == 2
    assert calls["reduce_scatter_tensor", "dp"] > 2


def test_experts_that_draw_are_refused_in_the_first_step(crew: Crew, tmp_path: Path) -> None:
    crew.begin(range(2), "routed.train", {**FSDP2, "noise": 0.1, "url": str(tmp_path)}, **of_run(FSDP2), ep=2)
    outcomes = [crew.outcome(number) for number in range(2)]
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    for outcome in outcomes:
        assert "the experts of the MoE layer 'model.layers.0.mlp.experts' draw random numbers" in outcome.result.message
        assert outcome.reports == []

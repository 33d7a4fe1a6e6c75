"""Step time by part: what each choice costs, and on which link."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.planner.cost_model import CostModel
from elastic.planner.devices import DEVICES, Cluster
from elastic.planner.links import Link
from elastic.planner.model_shape import MODELS, ModelShape
from elastic.planner.strategy import Mesh, Strategy
from elastic.planner.workload import workload

CLUSTER = Cluster(DEVICES["H100"], 8)
COST = CostModel(CLUSTER)
MODEL = MODELS["gpt3-6.7b"]


def volumes(strategy: Strategy, mesh: Mesh, model: ModelShape = MODEL) -> dict[tuple[str, str], float]:
    """Bytes on the wire per collective of a step, in units of one two-byte copy of the first stage's parameters."""
    unit = 2.0 * sum(t.numel * t.count for t in model.stage_tensors(mesh.tp, mesh.pp, mesh.ep))
    rows = COST.step(workload(model, strategy, mesh)).collectives
    return {(row.operation, row.axis): row.sent_bytes / unit for row in rows}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, {("all_reduce", "dp"): 2}),
        (1, {("all_reduce", "dp"): 2, ("all_gather", "dp"): 1}),
        (2, {("all_reduce", "dp"): 4, ("all_gather", "dp"): 1}),
        (3, {("all_gather", "dp"): 4, ("reduce_scatter", "dp"): 2}),
    ],
)
def test_gradients_and_weights_travel_as_deepspeed_sends_them(
    stage: int, expected: dict[tuple[str, str], float]
) -> None:
    # Two micro-batches per step; an all-reduce passes each byte twice.
    found = volumes(Strategy(stage, global_batch=128, micro_batch=1), Mesh(dp=64))
    assert found == pytest.approx({key: value * 63 / 64 for key, value in expected.items()}, rel=1e-6)


def test_parts_add_up_and_the_bubble_is_that_of_one_forward_one_backward() -> None:
    strategy, mesh = Strategy(1, global_batch=64, micro_batch=1, recompute="full"), Mesh(dp=2, tp=4, pp=8)
    found = COST.step(workload(dataclasses.replace(MODEL, vocabulary=0), strategy, mesh))
    parts = found.compute_s + found.exposed_s + found.bubble_s + found.optimizer_s + found.offload_s + found.fixed_s
    assert found.total_s == pytest.approx(parts)
    inside = found.compute_s + sum(row.exposed_s for row in found.collectives if row.axis != "dp")
    assert found.bubble_s / inside == pytest.approx(7 / 32)
    halved = COST.step(workload(MODEL, dataclasses.replace(strategy, virtual_stages=2), mesh))
    assert halved.bubble_s < found.bubble_s


def test_groups_inside_a_node_are_faster_and_rings_share_the_network() -> None:
    mesh = Mesh(dp=8, tp=8)
    inside, across = COST.link("tp", mesh), COST.link("dp", mesh)
    assert 1 / inside.beta_s_per_byte == pytest.approx(0.959 * 450e9)
    # Eight rings, one per tp rank, leave each node at once.
    assert 1 / across.beta_s_per_byte == pytest.approx(0.949 * 400e9 / 8)
    assert 1 / COST.link("dp", Mesh(dp=64)).beta_s_per_byte == pytest.approx(0.949 * 400e9)
    assert COST.link("pp", Mesh(tp=2, pp=4)).beta_s_per_byte == inside.beta_s_per_byte


def test_a_measured_link_takes_the_place_of_the_clusters() -> None:
    work = workload(MODEL, Strategy(1, global_batch=64), Mesh(dp=64))
    slow = CostModel(CLUSTER, links={"dp": Link(1e-3, 1e-9)}).step(work)
    assert slow.exposed_s > COST.step(work).exposed_s
    assert slow.compute_s == COST.step(work).compute_s


def test_overlap_hides_a_part_of_the_communication_and_never_more_than_all() -> None:
    strategy, mesh = Strategy(1, global_batch=64, micro_batch=1), Mesh(dp=64)
    plain = COST.step(workload(MODEL, strategy, mesh))
    hidden = COST.step(workload(MODEL, dataclasses.replace(strategy, overlap=True), mesh))
    assert 0 < hidden.exposed_s < plain.exposed_s
    assert sum(row.seconds for row in hidden.collectives) == pytest.approx(plain.exposed_s)


def test_recomputation_adds_a_third_of_the_flops() -> None:
    works = [workload(MODEL, Strategy(recompute=how), Mesh()) for how in ("none", "full")]
    assert works[1].flops / works[0].flops == pytest.approx(4 / 3)
    assert works[0].model_flops == works[1].model_flops


def test_experts_and_sequence_ranks_exchange_tokens() -> None:
    model = dataclasses.replace(MODEL, experts=8, experts_per_token=2)
    assert ("all_to_all", "ep") in volumes(Strategy(global_batch=64), Mesh(dp=64, ep=8), model)
    found = volumes(Strategy(3, global_batch=8), Mesh(dp=8, sp=8))
    assert ("all_to_all", "sp") in found


def test_offload_takes_the_optimizer_off_the_device_and_costs_the_host_link() -> None:
    strategy, mesh = Strategy(2, global_batch=64), Mesh(dp=64)
    kept = COST.step(workload(MODEL, strategy, mesh))
    moved = COST.step(workload(MODEL, dataclasses.replace(strategy, offload="optimizer"), mesh))
    assert (kept.offload_s, moved.optimizer_s) == (0, 0)
    assert moved.offload_s > kept.optimizer_s > 0


def test_the_fullest_stage_sets_the_pace() -> None:
    """With 33 layers on 8 stages one stage has five layers and the others four."""
    bare = dataclasses.replace(MODEL, vocabulary=0)
    even, uneven = (
        COST.step(workload(dataclasses.replace(bare, layers=layers), Strategy(global_batch=64), Mesh(pp=8)))
        for layers in (32, 33)
    )
    assert uneven.total_s / even.total_s == pytest.approx(5 / 4, rel=0.02)


def test_a_last_stage_with_logits_sets_the_pace_where_layers_are_even() -> None:
    wide = dataclasses.replace(MODEL, vocabulary=200_000)
    bare = dataclasses.replace(MODEL, vocabulary=0)
    with_logits, without = (
        COST.step(workload(model, Strategy(global_batch=64), Mesh(pp=8))).compute_s for model in (wide, bare)
    )
    head = workload(wide, Strategy(global_batch=64), Mesh(pp=8)).head_flops / (0.877 * 794.5e12)
    assert with_logits - without >= 64 * head

"""The search: what fits is ranked, what does not is refused with a reason, and the shortcuts hide nothing."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from elastic.core.errors import UsageError
from elastic.planner.devices import DEVICES, Cluster, parse_cluster
from elastic.planner.model_shape import MODELS, ModelShape
from elastic.planner.search import Planner, PlanningFacts, meshes, refusals
from elastic.planner.strategy import OFFLOAD, RECOMPUTE, Mesh, Strategy

GPT = ModelShape(24, 2048, 16, 50_257, 1024)
FACTS = PlanningFacts(GPT, Cluster(DEVICES["A100"], 2), 64)


def test_the_fastest_comes_first_and_the_refused_last() -> None:
    found = Planner().rank(FACTS)
    can = [one for one in found if not one.refusal]
    times = [one.time.total_s for one in can if one.time is not None]
    assert len(times) == len(can) > 20
    assert times == sorted(times)
    assert found[: len(can)] == tuple(can)
    assert all(one.reason for one in found)


def test_equal_facts_give_an_equal_ranking() -> None:
    assert Planner().rank(FACTS) == Planner().rank(dataclasses.replace(FACTS))


def test_no_skipped_combination_is_faster_than_the_best_one() -> None:
    """Against every combination of every mesh, without the search's shortcuts."""
    planner, facts = Planner(), PlanningFacts(GPT, Cluster(DEVICES["A100"], 1), 32)
    times = []
    for mesh, stage, micro, recompute, offload in itertools.product(
        meshes(facts), range(4), (1, 2, 4, 8, 16, 32), RECOMPUTE, OFFLOAD
    ):
        one = planner.evaluate(facts, mesh, Strategy(stage, 32, micro, recompute, offload))
        if one.time is not None:
            times.append(one.time.total_s)
    first = planner.rank(facts)[0].time
    assert first is not None
    assert first.total_s == pytest.approx(min(times), rel=1e-9)


def test_meshes_use_every_rank_unless_some_may_be_idle() -> None:
    facts = PlanningFacts(MODELS["gpt2"], Cluster(DEVICES["A100"], 1, 7), 8)
    assert {mesh.world_size for mesh in meshes(facts)} == {7}
    # Twelve heads cannot be cut in seven, so that only a smaller world has more than dp and pp.
    assert {mesh.tp for mesh in meshes(dataclasses.replace(facts, spare_ranks=1))} == {1, 2, 3, 6, 7}


def test_a_batch_that_does_not_divide_is_dealt_unevenly_but_every_rank_needs_a_sample() -> None:
    facts = PlanningFacts(GPT, Cluster(DEVICES["A100"], 1, 7), 24, axes=("dp",))
    uneven = Planner().evaluate(facts, Mesh(dp=7), Strategy(1, 24, 2))
    assert uneven.refusal == ""
    assert uneven.strategy.micro_steps(uneven.mesh) == 2
    few = Planner().evaluate(dataclasses.replace(facts, global_batch=6), Mesh(dp=7), Strategy(1, 6, 1))
    assert few.reason == "a global batch of 6 leaves some of dp7 without a sample"


def test_only_the_named_axes_grow() -> None:
    facts = PlanningFacts(GPT, Cluster(DEVICES["A100"], 2), 64, axes=("dp",))
    assert list(meshes(facts)) == [Mesh(dp=16)]


@pytest.mark.parametrize(
    ("mesh", "strategy", "kind", "says"),
    [
        (Mesh(dp=32), Strategy(), "ranks", "dp32 needs 32 ranks, the cluster has 16"),
        (Mesh(tp=16), Strategy(), "node", "does not fit into a node of 8 devices"),
        (Mesh(pp=16, dp=1), Strategy(2), "pipeline with ZeRO", "ZeRO stages 0 and 1 only"),
        (Mesh(dp=2, pp=4, sp=2), Strategy(), "pipeline with sp", "no sequence parallelism"),
        (Mesh(dp=4, pp=4), Strategy(1, micro_batch=3), "batch", "64 is no multiple of dp4 x micro-batch 3"),
        (Mesh(tp=8), Strategy(3), "nothing to shard over", "more than one data-parallel rank"),
        (Mesh(dp=16, ep=2), Strategy(), "experts", "ep2 divides not both 16 ranks and 1 experts"),
        (Mesh(dp=16), Strategy(0, offload="optimizer"), "offload", "needs ZeRO-1 or higher"),
        (Mesh(dp=16), Strategy(2, offload="parameters"), "offload", "needs ZeRO-3"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_is_refused_by_name(mesh: Mesh, strategy: Strategy, kind: str, says: str) -> None:
    found = Planner().evaluate(FACTS, mesh, dataclasses.replace(strategy, global_batch=64))
    assert found.refusal == kind
    assert says in found.reason
    assert found.time is None


def test_a_model_that_is_too_large_says_what_it_needs_and_which_part_is_largest() -> None:
    facts = PlanningFacts(MODELS["gpt3-175b"], Cluster(DEVICES["A100"], 1), 8, axes=("dp",), zero_stages=(1,))
    (one,) = Planner().rank(facts)
    assert one.refusal == "memory"
    assert "of 79.3 with recompute full and offload optimizer; largest part: weights 325" in one.reason


def test_host_memory_limits_offload() -> None:
    model, cluster = MODELS["llama-2-13b"], Cluster(DEVICES["A100"], 1, 2)
    facts = PlanningFacts(model, cluster, 8, axes=("dp",), zero_stages=(2,))
    free = Planner().rank(facts)[0]
    assert free.strategy.offload == "optimizer"
    small = dataclasses.replace(facts, cluster=dataclasses.replace(cluster, host_memory_bytes=100 * 2**30))
    (tight,) = Planner().rank(small)
    assert tight.refusal == "host memory"
    assert "of 100 host memory per node" in tight.reason


def test_refusals_are_grouped_with_the_commonest_first() -> None:
    facts = PlanningFacts(MODELS["llama-3-70b"], parse_cluster("8x8xH100"), 512)
    found = Planner().rank(facts)
    groups = refusals(found)
    counts = [count for count, _ in groups.values()]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == sum(1 for one in found if one.refusal)
    assert groups["memory"][1].refusal == "memory"


@pytest.mark.parametrize(
    ("text", "says"),
    [("8x", "written NODESxDEVICESxKIND"), ("8x8xT4", "no device is called 'T4'; known devices: A100-40GB"),
     ("0x8xH100", "at least one node of one device")],
)  # fmt: skip
def test_a_cluster_that_cannot_be_read_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_cluster(text)
    assert says in str(refused.value)


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown axis 'cp'; the axes of a mesh are dp, tp, pp, sp, ep"):
        PlanningFacts(GPT, Cluster(DEVICES["A100"], 1), 8, axes=("dp", "cp"))

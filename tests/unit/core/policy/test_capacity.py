"""What a cluster can hold, now or ever, and the one sentence that says what is short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.capacity import Cluster, Need, NodeType, Supply, fits, judge

NODE = {"CPU": 16.0, "GPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}


def hand(*nodes: dict[str, float]) -> Cluster:
    return Cluster({f"n{i}": node for i, node in enumerate(nodes)})


def scaled(*types: NodeType, nodes: tuple[dict[str, float], ...] = ()) -> Cluster:
    return Cluster({f"n{i}": node for i, node in enumerate(nodes)}, autoscaled=True, types=types)


def test_enough_says_nothing() -> None:
    judged = judge(Need({"CPU": 4, "GPU": 1}, 1, 8), hand(NODE, NODE))
    assert (judged.supply, judged.sentence) == (Supply.ENOUGH, "")


def test_a_worker_that_no_node_type_can_hold_is_refused_with_the_resource_that_is_short() -> None:
    cluster = scaled(NodeType("small", {"CPU": 16, "GPU": 4}, 10), nodes=(NODE,))
    judged = judge(Need({"CPU": 1, "GPU": 8}), cluster)
    assert judged.supply is Supply.NEVER
    assert judged.sentence == (
        "a worker wants GPU: 8, the largest node has GPU: 4, and no node type of the autoscaler offers more"
    )


def test_without_an_autoscaler_nobody_brings_a_larger_node() -> None:
    judged = judge(Need({"GPU": 2}, 4), hand(NODE))
    assert judged.supply is Supply.NEVER
    assert judged.sentence == (
        "a slot of 4 workers, on one node, wants GPU: 8, the largest node has GPU: 4, "
        "and there is no autoscaler to add one"
    )


def test_a_slip_in_a_name_is_told_with_the_nearest_one() -> None:
    judged = judge(Need({"CPU": 1, "GPUs": 1}), hand(NODE))
    assert judged.supply is Supply.NEVER
    assert "GPUs: 1, which no node has (did you mean GPU?)" in judged.sentence


def test_a_gpu_is_no_slip_of_a_cpu() -> None:
    judged = judge(Need({"CPU": 1, "GPU": 1}), hand({"CPU": 8.0}))
    assert judged.sentence == (
        "a worker wants GPU: 1, which no node has (there are CPU), and there is no autoscaler to add one"
    )


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    assert "fpga: 1, which no node has (there are CPU, GPU, memory)" in judge(Need({"fpga": 1}), hand(NODE)).sentence


def test_resources_that_are_there_but_not_on_one_node() -> None:
    judged = judge(Need({"CPU": 8, "GPU": 4}), hand({"CPU": 64}, {"CPU": 4, "GPU": 8}))
    assert judged.supply is Supply.NEVER
    assert "wants CPU: 8, GPU: 4 together, the closest node has " in judged.sentence


def test_too_few_nodes_are_waited_for_where_somebody_may_add_one() -> None:
    judged = judge(Need({"GPU": 4}, 1, 3), hand(NODE))
    assert judged.supply is Supply.MISSING
    assert judged.sentence == (
        "the run needs 3 slots of GPU: 4 at least and the nodes have room for 1: 2 short; "
        "there is no autoscaler, so nodes must be added by hand"
    )


def test_an_autoscaler_that_can_bring_them_is_waited_for() -> None:
    judged = judge(Need({"GPU": 4}, 1, 3), scaled(NodeType("gpu", {"GPU": 4}, 3)))
    assert (judged.supply, "waiting for the autoscaler" in judged.sentence) == (Supply.COMING, True)


def test_an_autoscaler_whose_limit_is_too_low_is_not() -> None:
    judged = judge(Need({"GPU": 4}, 1, 4), scaled(NodeType("gpu", {"GPU": 4}, 3)))
    assert judged.supply is Supply.NEVER
    assert judged.sentence.endswith("with every node that its autoscaler may start there is room for 3")


def test_nodes_that_the_autoscaler_has_started_do_not_count_twice() -> None:
    kind = NodeType("gpu", {"GPU": 4}, 2)
    started = Cluster({"a": NODE, "b": NODE}, {"a": "gpu"}, autoscaled=True, types=(kind,))
    assert judge(Need({"GPU": 4}, 1, 3), started).supply is Supply.COMING, "one by hand, two of the autoscaler's"
    both = Cluster({"a": NODE, "b": NODE}, {"a": "gpu", "b": "gpu"}, autoscaled=True, types=(kind,))
    assert judge(Need({"GPU": 4}, 1, 3), both).supply is Supply.NEVER


def test_an_autoscaler_that_keeps_its_node_types_to_itself_is_waited_for() -> None:
    judged = judge(Need({"GPU": 8}), Cluster({"a": NODE}, autoscaled=True))
    assert judged.supply is Supply.MISSING
    assert "its autoscaler does not report whether it has a larger node type" in judged.sentence


def test_a_type_without_a_limit_can_always_bring_more() -> None:
    assert judge(Need({"GPU": 4}, 1, 1000), scaled(NodeType("gpu", {"GPU": 4}))).supply is Supply.COMING


def test_parts_of_a_cpu_add_up() -> None:
    assert fits({"CPU": 0.1}, {"CPU": 1.0}) == 10


COUNTS = st.integers(0, 8).map(float)
RESOURCES = st.fixed_dictionaries({"CPU": COUNTS, "GPU": COUNTS})


@given(
    slot=RESOURCES,
    nodes=st.lists(RESOURCES, max_size=4),
    types=st.none() | st.lists(RESOURCES, max_size=3),
    autoscaled=st.booleans(),
    least=st.integers(1, 5),
    count=st.integers(0, 4),
)
def test_nothing_that_fits_is_refused_and_what_is_short_is_always_said(
    slot: dict[str, float],
    nodes: list[dict[str, float]],
    types: list[dict[str, float]] | None,
    autoscaled: bool,
    least: int,
    count: int,
) -> None:
    known = None if types is None else tuple(NodeType(f"t{i}", kind, count) for i, kind in enumerate(types))
    cluster = Cluster({f"n{i}": node for i, node in enumerate(nodes)}, {}, autoscaled, known if autoscaled else None)
    need = Need(slot, 1, least)
    judged = judge(need, cluster)
    here = sum(fits(need.slot, node) for node in nodes)
    more = sum(fits(need.slot, kind) * count for kind in types or ()) if autoscaled else 0
    assert (judged.supply is Supply.ENOUGH) == (here >= least)
    assert bool(judged.sentence) == (here < least)
    if here + more >= least:
        assert judged.supply is not Supply.NEVER
    if autoscaled and types is not None and here + more < least:
        assert judged.supply is Supply.NEVER


@pytest.mark.parametrize("least", [1, 4])
def test_a_slot_that_wants_nothing_fits_on_every_node(least: int) -> None:
    assert judge(Need({"CPU": 0}, 1, least), hand(*[NODE] * 4)).supply is Supply.ENOUGH


def test_what_placement_groups_have_taken_is_no_resource_to_ask_for() -> None:
    taken = {"CPU": 1.0, "CPU_group_0_ab12": 1.0, "CPU_group_ab12": 1.0, "bundle_group_ab12": 1000.0}
    told = judge(Need({"GPU": 1.0}), Cluster(nodes={"a": taken})).sentence
    assert "(there are CPU)" in told

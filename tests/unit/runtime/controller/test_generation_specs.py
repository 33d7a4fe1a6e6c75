"""What each member of a generation is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.actions import BeginGeneration
from elastic.core.mesh import MeshSettings
from elastic.core.settings import CommunicationSettings, RunSettings
from elastic.runtime.controller.hands.generation_specs import memory_plans, shared_spec
from elastic.runtime.messages import NodeFacts


@pytest.mark.parametrize(("checkpoint", "content"), [("step-00000004-g0001", {40: 7}), (None, {})])
def test_repeated_steps_are_known_where_the_run_goes_on_from_a_checkpoint(
    checkpoint: str | None, content: dict[int, int]
) -> None:
    """A run that begins anew may have been given other data."""
    begin = BeginGeneration(2, (0, 1), checkpoint, 4 if checkpoint else 0)
    assert shared_spec(RunSettings("r"), begin, {40: 7}).content == content


def test_ranks_know_who_shares_a_node_where_gradients_travel_by_it() -> None:
    begin, nodes = BeginGeneration(2, (0, 1, 2), None, 0), ["b", "a", "b"]
    plain = shared_spec(RunSettings("r"), begin, None, nodes)
    asked = shared_spec(RunSettings("r", communication=CommunicationSettings()), begin, None, nodes)
    assert (plain.communication, plain.nodes) == (None, ())
    assert (asked.communication, asked.nodes) == (CommunicationSettings(), (0, 1, 0))


def test_what_all_ranks_are_told_is_made_once() -> None:
    """The plans of 80,000 ranks, once for each of them, would be half a second."""
    begin, nodes = BeginGeneration(2, tuple(range(6)), "step-00000004-g0001", 4), ["b", "b", "a", "a", "c", "c"]
    known = {node: NodeFacts("mailbox", (node, 1), "memory") for node in nodes}
    settings = RunSettings("r", communication=CommunicationSettings())
    plans = memory_plans(settings, nodes, known)
    assert [id(plans[rank]) for rank in (1, 3, 5)] == [id(plans[rank]) for rank in (0, 2, 4)]
    shared = shared_spec(settings, begin, {40: 7}, nodes)
    mine = shared.of_rank(3, plans[3])
    assert (mine.rank, mine.memory) == (3, plans[3])
    assert mine == replace(shared, rank=3, memory=plans[3])


@pytest.mark.parametrize("mesh", [MeshSettings(pp=2), MeshSettings(tp=2), MeshSettings(ep=2)])
def test_replicas_are_with_the_same_part_of_the_model(mesh: MeshSettings) -> None:
    nodes = [f"n{number}" for number in range(8)]
    known = {node: NodeFacts("mailbox", (node, 1), "memory") for node in nodes}
    settings = RunSettings("r", mesh=mesh)
    for rank, plan in enumerate(memory_plans(settings, nodes, known)):
        assert plan is not None
        ((target, _),) = plan.targets
        assert nodes.index(target) % 2 == rank % 2
    # Two neighbouring ranks to the node, which has both parts.
    plans = memory_plans(settings, [node for node in nodes[:4] for _ in range(2)], known)
    assert plans == memory_plans(RunSettings("r"), [node for node in nodes[:4] for _ in range(2)], known)


def test_the_nodes_that_may_take_a_keepers_place_are_none_that_keep_the_shard() -> None:
    nodes = [f"n{number}" for number in range(5)]
    known = {node: NodeFacts("mailbox", ("10.0.0.1", number), "memory") for number, node in enumerate(nodes)}
    for rank, plan in enumerate(memory_plans(RunSettings("r"), nodes, known)):
        assert plan is not None
        assert len(plan.targets) == 1
        assert len({("10.0.0.1", rank), *plan.targets, *plan.spares}) == 4
    pair = memory_plans(RunSettings("r"), nodes[:2], known)
    assert [plan.spares for plan in pair if plan is not None] == [(), ()]

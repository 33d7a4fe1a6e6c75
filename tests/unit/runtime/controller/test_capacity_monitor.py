"""What a run hears of its cluster and of other runs, from Ray's own messages to the events of the state machine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from machine_scenario import Scenario
from ray.core.generated import autoscaler_pb2

from elastic.core import events as ev
from elastic.core.policy.capacity import Cluster, NodeType
from elastic.core.policy.priority_sharing import HOLD_S, Claim
from elastic.runtime import names
from elastic.runtime.controller.senses.capacity_monitor import CapacityMonitor, claim_of
from elastic.runtime.controller.senses.cluster_view import ClusterView, view_of

messages: Any = autoscaler_pb2
CPU = {"CPU": 1.0}


def node(reply: Any, name: str, kind: str, status: int, total: float, free: float) -> None:
    added = reply.cluster_resource_state.node_states.add()
    added.node_id, added.ray_node_type_name, added.status = bytes.fromhex(name), kind, status
    added.total_resources["CPU"], added.available_resources["CPU"] = total, free


@pytest.fixture
def reply() -> Any:
    made = messages.GetClusterStatusReply()
    node(made, "aa", "head", messages.NodeStatus.Value("IDLE"), 0.0, 0.0)
    node(made, "bb", "worker", messages.NodeStatus.Value("RUNNING"), 4.0, 1.0)
    node(made, "cc", "worker", messages.NodeStatus.Value("DEAD"), 4.0, 4.0)
    node(made, "dd", "worker", messages.NodeStatus.Value("DRAINING"), 4.0, 4.0)
    made.autoscaling_state.autoscaler_state_version = 3
    gang = made.cluster_resource_state.pending_gang_resource_requests.add()
    gang.requests.add().resources_bundle["CPU"] = 1.0
    return made


def test_what_ray_tells_of_its_cluster(reply: Any) -> None:
    reply.autoscaling_state.pending_instance_requests.add().count = 2
    reply.autoscaling_state.pending_instances.add()
    types = (NodeType("worker", {"CPU": 4.0}, 3),)
    view = view_of(reply, types)
    assert view.cluster.nodes == {"aa": {"CPU": 0.0}, "bb": {"CPU": 4.0}}, "those that live and stay"
    assert view.cluster.started == {"aa": "head", "bb": "worker"}
    assert (view.cluster.autoscaled, view.cluster.types) == (True, types)
    assert (view.free["bb"], view.arriving, view.demand) == (CPU, 3, (CPU,))


def test_an_autoscaler_that_merely_watches_is_none(reply: Any) -> None:
    for each in reply.cluster_resource_state.node_states:
        each.ray_node_type_name = ""
    assert not view_of(reply, None).cluster.autoscaled


def test_nor_is_there_one_where_nothing_is_told(reply: Any) -> None:
    reply.autoscaling_state.autoscaler_state_version = 0
    view = view_of(reply, (NodeType("worker", CPU),))
    assert (view.cluster.autoscaled, view.cluster.types) == (False, None)


def test_controllers_know_each_other_by_name() -> None:
    assert names.is_controller(names.controller("run-1"))
    assert not names.is_controller(names.worker("run-1", 1, 2))


class Watched:
    """A run that may have three slots and has none, and the watch next to it."""

    def __init__(self, low: int = 1, placed: int = 0) -> None:
        self.s = Scenario(low, 3).do(ev.RunStarted())
        if placed:
            self.s.nodes(placed)
        self.heard: list[ev.Event] = []
        self.watch = CapacityMonitor(lambda: self.s.state, self.heard.append, clock=lambda: self.s.now)

    def look(self, view: ClusterView, *others: Claim, after: float = 1.0) -> list[ev.Event]:
        """What is heard of it."""
        self.s.wait(after)
        self.heard.clear()
        asyncio.run(self.watch.look(view, list(others)))
        if self.heard:
            self.s.do(*self.heard)
        return list(self.heard)


EMPTY = ClusterView(Cluster({"head": {"memory": 1.0}}, autoscaled=True, types=(NodeType("w", CPU, 3),)))
NEVER = ClusterView(Cluster({"head": {"memory": 1.0}}))


def test_what_is_short_is_told_once() -> None:
    watched = Watched()
    (told,) = watched.look(EMPTY)
    assert isinstance(told, ev.CapacityJudged)
    assert (told.never, "the nodes have room for 0: 1 short" in told.sentence) == (False, True)
    assert watched.look(EMPTY) == []


def test_what_can_never_be_had_is_refused_when_the_cluster_has_had_time_to_show_its_nodes() -> None:
    watched = Watched()
    assert [event.never for event in watched.look(NEVER) if isinstance(event, ev.CapacityJudged)] == [False]
    assert watched.look(EMPTY) != []
    assert watched.look(NEVER) != []
    assert watched.look(NEVER, after=14.0) == []
    (told,) = watched.look(NEVER, after=1.5)
    assert isinstance(told, ev.CapacityJudged)
    assert told.never
    assert watched.s.end[0] == "no-capacity"


def other(run: str, held: int, wanted: int, least: int = 1, priority: int = 0) -> Claim:
    return Claim(run, priority, 2000.0, CPU, least, held, wanted)


def test_another_run_that_waits_is_made_room_for_and_remembered_for_a_while() -> None:
    watched = Watched(placed=3)
    full = replace(EMPTY, cluster=Cluster({"a": {"CPU": 3.0}}))
    (told,) = watched.look(full, other("b", 0, 2, least=2))
    assert isinstance(told, ev.SlotsShared)
    assert told.limit == 1
    assert watched.look(full, other("b", 2, 0, least=2)) == [], "what was given is on its way"
    assert watched.look(full, other("b", 2, 0, least=2), after=HOLD_S) == [ev.SlotsShared(None)]


def test_a_slot_counts_as_wanted_after_a_while_and_later_while_nodes_are_on_their_way() -> None:
    s = Scenario(1, 3).do(ev.RunStarted())
    soon = s.state.settings.scaling.share_after_s
    assert claim_of(s.state, EMPTY, s.now + soon - 1.0).wanted == 0
    assert claim_of(s.state, EMPTY, s.now + soon).wanted == 3
    assert claim_of(s.state, replace(EMPTY, arriving=1), s.now + soon).wanted == 0
    assert claim_of(s.state, replace(EMPTY, arriving=1), s.now + 10 * soon).wanted == 3

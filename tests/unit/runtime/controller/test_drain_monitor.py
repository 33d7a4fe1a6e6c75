"""The list of nodes that are about to go, as it is told; and which node a person means."""

from __future__ import annotations

import asyncio

import pytest
from elastic_cluster.draining import RayNode, choose
from elastic_cluster.source import ClusterError

from elastic.core.events import NodesDraining
from elastic.runtime.controller.senses import drain_monitor
from elastic.runtime.controller.senses.drain_monitor import DrainMonitor


class Ray:
    def __init__(self) -> None:
        self.listed: dict[str, float] = {}
        self.dead: set[str] = set()
        self.used: set[str] = {"a", "b"}
        self.told: list[NodesDraining] = []
        # By how much the wall clock is ahead of the run's.
        self.ahead_s = 0.0

    def watch(self, **known: float) -> DrainMonitor:
        listed, dead = (lambda: dict(self.listed)), (lambda: self.dead)
        return DrainMonitor(known, lambda: self.used, self.told.append, lambda when: when - self.ahead_s, listed, dead)

    def look(self, watch: DrainMonitor) -> list[NodesDraining]:
        self.told.clear()
        asyncio.run(watch.look())
        return self.told


def test_a_change_is_told_once() -> None:
    ray = Ray()
    watch = ray.watch()
    assert ray.look(watch) == []
    ray.listed = {"a": 17.0}
    assert ray.look(watch) == [NodesDraining((("a", 17.0),))]
    assert ray.look(watch) == []
    ray.listed = {"a": 19.0, "x": 0.0}
    assert ray.look(watch) == [NodesDraining((("a", 19.0), ("x", 0.0)))]
    ray.listed = {}
    assert ray.look(watch) == [NodesDraining(())]


def test_a_wall_clock_that_is_set_moves_no_deadline() -> None:
    ray = Ray()
    watch = ray.watch()
    ray.listed, ray.ahead_s = {"a": 1000.0}, 1.0
    assert ray.look(watch) == [NodesDraining((("a", 999.0),))]
    ray.ahead_s = -3600.0
    assert ray.look(watch) == []
    ray.listed = {"a": 1000.0, "b": 0.0}
    assert ray.look(watch) == [NodesDraining((("a", 999.0), ("b", 0.0)))]


def test_a_node_of_the_run_that_has_died_has_not_been_told_to_stay() -> None:
    ray = Ray()
    watch = ray.watch(a=17.0, x=18.0)
    ray.dead = {"a", "x"}
    assert ray.look(watch) == [NodesDraining((("a", 17.0),))]
    assert ray.look(watch) == []
    ray.listed = {"b": 20.0}
    assert ray.look(watch) == [NodesDraining((("a", 17.0), ("b", 20.0)))]
    ray.used = {"b"}
    assert ray.look(watch) == [NodesDraining((("b", 20.0),))]


def test_whatever_goes_wrong_the_next_look_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_monitor, "_POLL_S", 0.0)
    answers = iter([ValueError("an answer that nobody expected"), {"a": 17.0}])

    def listed() -> dict[str, float]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    heard: list[NodesDraining] = []

    def told(event: NodesDraining) -> None:
        heard.append(event)
        # The watch continues for ever by itself.
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(DrainMonitor({}, set, told, float, listed, set).run())
    assert [event.nodes for event in heard] == [(("a", 17.0),)]


def test_a_restarted_controller_is_told_only_what_is_new() -> None:
    ray = Ray()
    ray.listed = {"a": 17.0}
    assert ray.look(ray.watch(a=17.0)) == []


NODES = (
    RayNode("abcd01", "node-0", "10.0.0.1"),
    RayNode("abcd02", "node-1", "10.0.0.2"),
    RayNode("ef0102", "10.0.0.3", "10.0.0.3"),
)


@pytest.mark.parametrize(
    ("wanted", "found"), [("node-1", 1), ("10.0.0.1", 0), ("abcd02", 1), ("EF01", 2), ("10.0.0.3", 2)]
)
def test_a_node_has_a_name_an_address_and_an_id(wanted: str, found: int) -> None:
    assert choose(NODES, wanted) == NODES[found]


@pytest.mark.parametrize(
    ("wanted", "told"), [("abcd", "2 nodes"), ("ef", "no living node"), ("node-7", "no living node"), ("", "no living")]
)
def test_a_name_that_says_too_little_is_refused_with_the_nodes_there_are(wanted: str, told: str) -> None:
    with pytest.raises(ClusterError, match=told) as refused:
        choose(NODES, wanted)
    assert "node-0 (abcd01)" in str(refused.value)

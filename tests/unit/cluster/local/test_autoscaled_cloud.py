"""The cloud that a cluster's autoscaler asks for machines, and what that autoscaler is configured with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
from elastic_cluster.local.autoscaled import autoscaler_config
from elastic_cluster.local.autoscaled_cloud import Cloud, CloudPlan
from elastic_cluster.local.node_table import Entry, Nodes
from elastic_cluster.source import ClusterError, NodeState

OPTIONS = {"num_cpus": 1, "num_gpus": 2, "resources": {"spot": 1}, "labels": {"zone": "a"}}


class World:
    """A cloud whose nodes start when the test says so, and a clock that it sets."""

    def __init__(self, max_nodes: int = 4, at_hand: int = 2, every_s: float | None = None) -> None:
        self.now = 0.0
        self.started: list[str] = []
        self.removed: list[str] = []
        self.nodes = Nodes("elc-test", os.getpid())
        self.nodes.define("node-0", True, OPTIONS).state = NodeState.ALIVE
        self.nodes.address = "127.0.0.1:1"
        plan = CloudPlan(OPTIONS, max_nodes, at_hand, every_s)
        self.cloud = Cloud(self.nodes, plan, self._start, self.removed.append, lambda: self.now)

    def _start(self, entry: Entry) -> None:
        self.started.append(entry.name)

    def up(self, *names: str) -> None:
        for name in names:
            self.nodes.entries[name].state = NodeState.ALIVE

    def lose(self, name: str) -> None:
        self.nodes.lost(self.nodes.entries[name])
        self.cloud.machine_lost()


def test_what_is_at_hand_is_started_and_the_rest_waits() -> None:
    world = World()
    assert world.cloud.launch(3, {"a": "b"}) == ["node-1", "node-2", "node-3"]
    assert world.started == ["node-1", "node-2"]
    told = world.cloud.instances()
    assert list(told) == ["node-1", "node-2", "node-3"], "what was asked for is not asked for again"
    assert told["node-3"] == {"running": False, "tags": {"a": "b"}}


def test_each_node_has_the_name_that_the_autoscaler_knows_it_by() -> None:
    world = World()
    world.cloud.launch(1, {})
    assert world.nodes.entries["node-1"].options["env_vars"]["RAY_CLOUD_INSTANCE_ID"] == "node-1"


def test_an_offer_starts_what_waits_longest() -> None:
    world = World()
    world.cloud.launch(4, {})
    assert world.cloud.one_more().name == "node-3"
    assert world.started == ["node-1", "node-2", "node-3"]


def test_what_can_be_had_is_set_and_takes_nothing_away() -> None:
    world = World()
    world.cloud.launch(3, {})
    world.cloud.offer(0)
    assert list(world.cloud.instances()) == ["node-1", "node-2", "node-3"]
    world.cloud.offer(3)
    assert world.started[-1] == "node-3"
    with pytest.raises(ClusterError, match="started for 4 nodes, so not for 5"):
        world.cloud.offer(5)


def test_no_more_is_offered_than_the_cluster_may_have() -> None:
    with pytest.raises(ClusterError, match="at most 2 nodes, and all are available already"):
        World(max_nodes=2).cloud.one_more()


def test_one_more_can_be_had_every_few_seconds() -> None:
    world = World(every_s=30.0)
    world.cloud.launch(4, {})
    world.now = 29.0
    world.cloud.tick()
    assert len(world.started) == 2
    world.now = 61.0
    world.cloud.tick()
    assert len(world.started) == 4


def test_a_machine_that_is_lost_is_gone_until_another_one_can_be_had() -> None:
    world = World(every_s=30.0)
    world.cloud.launch(2, {})
    world.up("node-1", "node-2")
    world.now = 10.0
    world.lose("node-1")
    assert list(world.cloud.instances()) == ["node-2"]
    assert world.cloud.launch(1, {}) == ["node-3"], "no name is used twice"
    assert world.started == ["node-1", "node-2"]
    world.now = 40.0
    world.cloud.tick()
    assert world.started[-1] == "node-3"


def test_a_node_that_is_given_back_makes_room_for_another() -> None:
    world = World()
    world.cloud.launch(3, {})
    world.up("node-1")
    world.cloud.terminate("node-1")
    assert world.removed == ["node-1"]
    world.nodes.lost(world.nodes.entries["node-1"])
    world.cloud.tick()
    assert world.started[-1] == "node-3"


def test_a_wish_can_be_taken_back_before_it_was_granted() -> None:
    world = World()
    world.cloud.launch(3, {})
    world.cloud.terminate("node-3")
    world.cloud.terminate("node-3")
    assert list(world.cloud.instances()) == ["node-1", "node-2"]
    assert world.cloud.one_more().name != "node-3"


def test_a_node_that_is_being_started_is_not_torn_from_the_starter() -> None:
    world = World()
    world.cloud.launch(1, {})
    with pytest.raises(ClusterError, match="node-1 is being started"):
        world.cloud.terminate("node-1")


def test_nothing_is_started_before_there_is_a_head_to_join() -> None:
    world = World()
    world.nodes.address = ""
    world.cloud.launch(1, {})
    assert world.started == []
    world.nodes.address = "127.0.0.1:1"
    world.cloud.tick()
    assert world.started == ["node-1"]


def test_ray_takes_the_configuration() -> None:
    ray_autoscaler = pytest.importorskip("ray.autoscaler")
    schema = json.loads((Path(ray_autoscaler.__file__).parent / "ray-schema.json").read_text())
    config = autoscaler_config(OPTIONS, 4, 5.0)
    jsonschema.validate(config, schema)
    assert config["available_node_types"]["worker"]["resources"] == {"CPU": 1, "GPU": 2, "spot": 1}
    objects = {key for key, value in schema["properties"].items() if value.get("type") in ("object", "array")}
    assert objects <= config.keys() | {"no_restart"}, "Ray looks them up without asking"

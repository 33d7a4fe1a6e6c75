"""A parameter server and its workers in Ray actors, and SIGKILL of a whole node; the bytes go past Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_cluster import LocalCluster, NodeInfo
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TENSORS = str(Path(__file__).resolve().parents[1] / "tensors")
MICROS, STEPS = 3, 20


@ray.remote(num_cpus=0, max_restarts=0)
class Server:
    def __init__(self, name: str) -> None:
        import parameter_servers as ps

        from elastic.comm.server.shard_server import ShardServer

        self.server = ShardServer(name, ps.TOKEN, "127.0.0.1")

    def address(self) -> tuple[str, int]:
        return self.server.address


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)
class Worker:
    """Waits before the push of its `asks_at`-th gradient until it is killed."""

    def __init__(self) -> None:
        import threading

        self.asks = threading.Event()
        self.never = threading.Event()

    def asked(self) -> None:
        self.asks.wait()

    def train(self, name: str, addresses: list[Any], asks_at: int | None) -> list[Any]:
        import parameter_servers as ps

        from elastic.comm.server.worker import ServerWorker

        net = ps.model()
        worker = ServerWorker(name, net, ps.adamw(net), addresses, ps.TOKEN)
        for count, micro in enumerate(worker.micros()):
            ps.loss(net, micro).backward()
            if count == asks_at:
                self.asks.set()
                self.never.wait()
            worker.push()
        return [each.tolist() for each in net.parameters()]


@pytest.fixture
def three_nodes() -> Iterator[LocalCluster]:
    with LocalCluster.start(3, cpus_per_node=1) as cluster:
        paths = os.pathsep.join([TENSORS, os.environ.get("PYTHONPATH", "")])
        ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
        yield cluster
        ray.shutdown()


def on(actor: Any, node: NodeInfo, *args: Any) -> Any:
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(*args)


def test_a_node_with_a_server_and_a_worker_is_killed(three_nodes: LocalCluster) -> None:
    import parameter_servers as ps

    from elastic.comm.server.shard_client import ShardClient
    from elastic.comm.server.worker import FlatModel
    from elastic.core.server.global_batches import begin
    from elastic.core.server.placement import first_view, next_view

    nodes = three_nodes.nodes()
    servers = {node.name: on(Server, node, node.name) for node in nodes}
    workers = {node.name: on(Worker, node) for node in nodes}
    view = first_view({name: ray.get(server.address.remote()) for name, server in servers.items()})
    addresses = list(view.addresses.values())
    client = ShardClient(addresses, ps.TOKEN)
    client.announce(view)
    net = ps.model()
    flat = FlatModel(net, ps.adamw(net))
    client.load(flat.shards(flat.specs(3, MICROS)), begin(MICROS, 0, STEPS))
    client.members(list(workers))
    lost = nodes[1].name
    dying = workers[lost].train.remote(lost, addresses, 5)
    ray.get(workers[lost].asked.remote())
    others = [workers[name].train.remote(name, addresses, None) for name in workers if name != lost]
    three_nodes.kill_node(lost)
    view = next_view(view, [lost])
    client.announce(view)
    client.protect()
    client.members([name for name in workers if name != lost])
    want = [each.tolist() for each in ps.plain(ps.adamw, MICROS, STEPS).parameters()]
    assert ray.get(others) == [want, want]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(dying)
    client.close()

"""Parameter servers and workers as threads of one process, on a small regression problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import torch
from torch import nn

from elastic.comm.server.shard import Shard
from elastic.comm.server.shard_client import ShardClient
from elastic.comm.server.shard_server import ShardServer
from elastic.comm.server.worker import FlatModel, ServerWorker
from elastic.core.server.global_batches import Batches, begin
from elastic.core.server.placement import first_view, next_view

TOKEN = bytes(32)
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
MICRO = 4  # samples of a micro-batch


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups of unlike rates and decay."""
    matrices = [each for each in net.parameters() if each.dim() > 1]
    others = [each for each in net.parameters() if each.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loss(net: nn.Module, micro: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 + micro)
    x = torch.randn(MICRO, 6, generator=chance)
    return (net(x).squeeze(1) - x.sum(1)).square().mean()


def plain(optimizer_of: OptimizerOf, micros: int, steps: int) -> nn.Sequential:
    """The oracle: torch alone. Gradients are added up in the order of the samples."""
    net = model()
    optimizer = optimizer_of(net)
    for step in range(steps):
        total = [torch.zeros_like(each) for each in net.parameters()]
        for micro in range(step * micros, (step + 1) * micros):
            optimizer.zero_grad()
            loss(net, micro).backward()
            for sum_, each in zip(total, net.parameters(), strict=True):
                assert each.grad is not None
                sum_ += each.grad
        for sum_, each in zip(total, net.parameters(), strict=True):
            each.grad = sum_ / micros
        optimizer.step()
    return net


class Cluster:
    """`count` servers, of which some may be closed; the test is who sees the whole."""

    def __init__(self, count: int) -> None:
        self.servers = {f"s{at}": ShardServer(f"s{at}", TOKEN, "127.0.0.1") for at in range(count)}
        self.view = first_view({name: server.address for name, server in self.servers.items()})
        self.client = ShardClient([server.address for server in self.servers.values()], TOKEN)
        self.client.announce(self.view)

    def begin(
        self,
        optimizer_of: OptimizerOf,
        batches: Batches,
        workers: Sequence[str],
        shards: Sequence[Shard] | None = None,
        rates: Sequence[float] = (1.0,),
    ) -> None:
        net = model()
        flat = FlatModel(net, optimizer_of(net))
        self.specs = flat.specs(len(self.view.shards), batches.micros, batches.cut_every, rates)
        self.client.load(shards or flat.shards(self.specs), batches)
        self.client.members(workers)

    def worker(self, name: str, optimizer_of: OptimizerOf) -> tuple[nn.Module, ServerWorker]:
        net = model()
        addresses = list(self.view.addresses.values())
        return net, ServerWorker(name, net, optimizer_of(net), addresses, TOKEN, limit_s=20)

    def train(
        self,
        optimizer_of: OptimizerOf,
        workers: Sequence[str],
        before_push: Callable[[str, int], None] = lambda worker, micro: None,
    ) -> list[nn.Module]:
        """All workers to the end of the run, at once."""

        def live(name: str) -> nn.Module:
            net, worker = self.worker(name, optimizer_of)
            with closing(worker):
                try:
                    for micro in worker.micros():
                        loss(net, micro).backward()
                        before_push(name, micro)
                        worker.push()
                except Exception:
                    self.client.members(())  # the others end too
                    raise
            return net

        with ThreadPoolExecutor(len(workers)) as pool:
            return list(pool.map(live, workers))

    def lose(self, name: str, joins: str | None = None) -> None:
        """A server is gone; its shards go on from their replicas, and another may take its place."""
        self.servers.pop(name).close()
        joined = {}
        if joins is not None:
            self.servers[joins] = ShardServer(joins, TOKEN, "127.0.0.1")
            joined[joins] = self.servers[joins].address
        self.view = next_view(self.view, [name], joined)
        self.client.announce(self.view)
        self.client.protect()

    def close(self) -> None:
        self.client.close()
        for server in self.servers.values():
            server.close()


@contextmanager
def cluster(count: int) -> Iterator[Cluster]:
    made = Cluster(count)
    try:
        yield made
    finally:
        made.close()


def run(
    count: int, optimizer_of: OptimizerOf, workers: Sequence[str], staleness: int, micros: int, steps: int
) -> list[nn.Module]:
    with cluster(count) as made:
        made.begin(optimizer_of, begin(micros, staleness, steps), workers)
        return made.train(optimizer_of, workers)

"""Processes of a parameter server and of its workers, on the convex problem; the test is who sees the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import forks
import torch
from convex import SAMPLES, Plane, problem
from torch.nn.functional import binary_cross_entropy_with_logits

from elastic.comm.server.shard_client import ShardClient
from elastic.comm.server.shard_server import ShardServer
from elastic.comm.server.worker import FlatModel, ServerWorker
from elastic.core.server.global_batches import Batches
from elastic.core.server.placement import first_view, next_view

TOKEN = bytes(range(32))
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Problem:
    lr: float
    ridge: float
    micro: int  # samples

    def model(self) -> tuple[Plane, torch.optim.Optimizer]:
        model = Plane()
        return model, torch.optim.SGD(model.parameters(), lr=self.lr, weight_decay=self.ridge)

    def loss(self, model: Plane, number: int) -> torch.Tensor:
        """Of micro-batch `number`; every epoch has the same order."""
        begin = number * self.micro % SAMPLES
        x, y = (tensor[begin : begin + self.micro] for tensor in problem())
        return binary_cross_entropy_with_logits(model(x), y)


def serve(pipe: Connection, name: str) -> None:
    server = ShardServer(name, TOKEN, "127.0.0.1")
    pipe.send(server.address)
    pipe.recv()


@contextmanager
def servers(count: int) -> Iterator[list[tuple[Any, Any]]]:
    """Processes, each the server of a node: (address, process)."""
    context, made = forks.context(), []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            made.append((context.Process(target=serve, args=(theirs, ""), daemon=True), ours))
            made[-1][0].start()
            theirs.close()
        yield [(pipe.recv(), process) for process, pipe in made]
    finally:
        for process, _ in made:
            process.kill()
            process.join()


def work(pipe: Connection, name: str, problem: Problem, addresses: list[Any], asks_at: int | None) -> None:
    """Trains to the end, once it is told to. Before it pushes its `asks_at`-th gradient it says so, and waits."""
    torch.set_num_threads(1)
    model, optimizer = problem.model()
    pipe.recv()
    worker = ServerWorker(name, model, optimizer, addresses, TOKEN)
    for count, micro in enumerate(worker.micros()):
        problem.loss(model, micro).backward()
        if count == asks_at:
            pipe.send(("at", micro))
            worker.heard(pipe.recv())
        worker.push()
    pipe.send(("weights", model.weight.tolist()))


class Processes:
    """Two servers, and workers. A process of the test is killed by SIGKILL, and never stopped in another way."""

    def __init__(self) -> None:
        self._context = forks.context()
        self._all: dict[str, tuple[Any, Connection]] = {}
        pipes = {name: self._start(name, serve) for name in ("s0", "s1", "s2", "s3")}
        self._addresses = {name: pipe.recv() for name, pipe in pipes.items()}
        self.view = first_view({name: self._addresses[name] for name in ("s0", "s1")})
        self.client = ShardClient(self.view.addresses.values(), TOKEN)
        self.client.announce(self.view)

    def _start(self, name: str, target: Any, *args: Any) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, name, *args), daemon=True)
        process.start()
        theirs.close()
        self._all[name] = process, ours
        return ours

    def begin(self, problem: Problem, batches: Batches, workers: dict[str, int | None]) -> None:
        model, optimizer = problem.model()
        flat = FlatModel(model, optimizer)
        self.client.load(flat.shards(flat.specs(len(self.view.shards), batches.micros)), batches)
        self.client.members(workers)
        for name, asks_at in workers.items():
            self._start(name, work, problem, list(self.view.addresses.values()), asks_at)

    def told(self, name: str) -> tuple[str, Any]:
        """What a worker says next."""
        pipe = self._all[name][1]
        assert wait([pipe], _LIMIT_S), f"{name} says nothing"
        message: tuple[str, Any] = pipe.recv()
        return message

    def go_on(self, name: str) -> None:
        self._all[name][1].send(self.view)

    def kill(self, name: str) -> None:
        process, _ = self._all.pop(name)
        process.kill()
        process.join()

    def replace_server(self, lost: str, joins: str) -> None:
        self.view = next_view(self.view, [lost], {joins: self._addresses[joins]})
        self.client.announce(self.view)
        self.client.protect()

    def close(self) -> None:
        self.client.close()
        for name in list(self._all):
            self.kill(name)


@contextmanager
def processes() -> Iterator[Processes]:
    made = Processes()
    try:
        yield made
    finally:
        made.close()

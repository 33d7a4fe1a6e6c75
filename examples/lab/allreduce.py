"""The exact strategies of `elastic.comm.strategies` on counted messages, and their times over gloo on this machine."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.comm.strategies import exact
from elastic.comm.strategies.exact import ring, tree

_LIMIT = timedelta(minutes=2)
Reduce = Callable[[Tensor, "Wire"], None]


class Wire:
    """Point to point messages of this rank, counted."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.messages = self.bytes = 0

    def send(self, tensor: Tensor, to: int) -> None:
        if (sent := self._begin(tensor, to)) is not None:
            sent.wait()

    def receive(self, like: Tensor, source: int) -> Tensor:
        found = torch.empty_like(like)
        if found.numel():
            dist.recv(found, source)
        return found

    def exchange(self, given: Tensor, to: int, like: Tensor, source: int) -> Tensor:
        """Sends `given` while it receives."""
        sent = self._begin(given, to)
        found = self.receive(like, source)
        if sent is not None:
            sent.wait()
        return found

    def _begin(self, tensor: Tensor, to: int) -> Any:
        """torch's handle; None where there is nothing to send: of few elements some ranks have no part."""
        if not tensor.numel():
            return None
        self.messages, self.bytes = self.messages + 1, self.bytes + tensor.nbytes
        return dist.isend(tensor, to)


def hierarchical(tensor: Tensor, wire: Wire, per_node: int) -> None:
    """Nodes are `per_node` ranks that follow each other. Raises ValueError where nodes are not equally large."""
    if wire.ranks % per_node:
        raise ValueError(f"{wire.ranks} ranks are not nodes of {per_node}")
    node, place = divmod(wire.rank, per_node)
    inside = range(node * per_node, (node + 1) * per_node)
    exact.hierarchical(tensor, wire, inside, range(place, wire.ranks, per_node))


# -- processes ---------------------------------------------------------------------------------------------------------


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(wire, *arguments)` in `ranks` processes with a gloo group on this machine; what each returned.

    Raises RuntimeError where one fails; the others are ended.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = [spawn.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            spawn.Process(target=_member, args=(rank, ranks, folder, results[rank][1], function, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for _, end in results:
            end.close()
        try:
            return _all([receiver for receiver, _ in results])
        finally:
            for process in processes:
                # With a result it has left the group, or is about to.
                process.kill()
                process.join()


def _all(receivers: Sequence[Connection]) -> list[Any]:
    found: dict[Connection, Any] = {}
    while len(found) < len(receivers):
        for receiver in wait([receiver for receiver in receivers if receiver not in found]):
            assert isinstance(receiver, Connection)
            try:
                found[receiver] = receiver.recv()
            except EOFError:
                raise RuntimeError("a process of the all-reduce has failed; what it said is above") from None
    return [found[receiver] for receiver in receivers]


def _member(rank: int, ranks: int, folder: str, result: Any, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=_LIMIT)
    # One that returned at once would leave while others still connect.
    dist.barrier()
    try:
        result.send(function(Wire(), *arguments))
    finally:
        dist.destroy_process_group()


def times(wire: Wire, per_node: int, sizes: Sequence[int], repetitions: int) -> dict[str, dict[int, list[float]]]:
    """What -> bytes -> seconds of each repetition, of the slowest rank. Repetitions of all are interleaved, so that
    what else the machine does hits all alike.

    "pair": a message to a neighbour and back, halved, while all other pairs do the same; "gloo": its own all-reduce.
    """
    reductions: dict[str, Reduce] = {
        "pair": _to_and_fro,
        "ring": ring,
        "tree": tree,
        "hierarchical": lambda tensor, wire: hierarchical(tensor, wire, per_node),
        "gloo": lambda tensor, wire: dist.all_reduce(tensor),
    }
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in reductions}
    for _ in range(repetitions + 1):
        for size in sizes:
            tensor = torch.zeros(size // 4)
            for name, reduce in reductions.items():
                dist.barrier()
                began_s = time.perf_counter()
                reduce(tensor, wire)
                slowest = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                found[name][size].append(slowest.item() / (2 if name == "pair" else 1))
    # The first one opens the connections.
    return {name: {size: spent[1:] for size, spent in by_size.items()} for name, by_size in found.items()}


def _to_and_fro(tensor: Tensor, wire: Wire) -> None:
    other = wire.rank ^ 1
    if wire.rank % 2:
        wire.receive(tensor, other)
    wire.send(tensor, other)
    if not wire.rank % 2:
        wire.receive(tensor, other)

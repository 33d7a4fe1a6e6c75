"""Messages between the ranks of one group, each counted in the ledger by the hop that it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.core.policy.hops import NODE, NODES, Islands


class Messages:
    """Implements `elastic.comm.strategies.exact.Wire`: ranks are those of `group`. Every message is waited for before
    the call returns; a lost peer raises what torch raises."""

    def __init__(self, group: dist.ProcessGroup, islands: Islands, ledger: CollectiveLedger) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group)
        home = {rank: number for number, own in enumerate(islands.places) for rank in own}
        self._hop = [NODE if home[rank] == home[self.rank] else NODES for rank in range(self.ranks)]
        sends = {hop: ledger.timed("send", self._exchange, axis=hop) for hop in (NODE, NODES)}
        receives = {hop: ledger.timed("recv", partial(self._exchange, None, 0), axis=hop) for hop in (NODE, NODES)}
        self._sends, self._receives = sends, receives
        self._slowest = ledger.timed("all_reduce", dist.all_reduce, axis="dp")
        self.all_reduce = ledger.timed("all_reduce", partial(dist.all_reduce, group=group), axis="dp")

    def slowest(self, seconds: list[float], device: torch.device) -> list[float]:
        """Of all ranks, each. Collective."""
        found = torch.tensor(seconds, dtype=torch.float64).to(device)
        self._slowest(found, dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in found.cpu().tolist()]

    def send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            self._sends[self._hop[to]](tensor, to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        found = torch.empty_like(like)
        if found.numel():
            self._receives[self._hop[source]](found, source)
        return found

    def exchange(self, given: Tensor, to: int, like: Tensor, source: int) -> Tensor:
        found = torch.empty_like(like)
        if given.numel() and found.numel():
            self._sends[self._hop[to]](given, to, found, source)
            return found
        # Of few elements some ranks have no part.
        self.send(given, to)
        if found.numel():
            self._receives[self._hop[source]](found, source)
        return found

    def _exchange(self, given: Tensor | None, to: int, taken: Tensor | None = None, source: int = 0) -> None:
        operations: list[Any] = []
        if given is not None:
            operations.append(dist.P2POp(dist.isend, given.contiguous(), self._global[to], self._group))
        if taken is not None:
            operations.append(dist.P2POp(dist.irecv, taken, self._global[source], self._group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()

"""The training function of `demo.py --links`: a table of pairs of bytes, whose gradients travel on emulated links.

A message has its link for as long as the emulated one would take, and only then does gloo carry it: the receiver waits
for it as on a slow link, and what measures the links sees what the strategies pay.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
import torch.distributed as dist
from emulated_links import Links, all_reduce_s, message_s
from gpt import stdlib_bytes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elastic
from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.strategies import reduction
from elastic.comm.strategies.messages import Messages
from elastic.core.policy.hops import Islands

PAIRS = 1 << 16


class Wire:
    """The links in step `step`, as one rank finds them. `folder` gets a file per node: who has locked it has the node's
    link to the others. A lock ends with its process."""

    def __init__(self, links: Links, folder: Path) -> None:
        self.step = 1
        self._links, self._folder = links, folder
        self._islands = Islands(((0,),))
        self._node = 0
        self._link: IO[bytes] | None = None

    def join(self, islands: Islands, rank: int) -> None:
        """As this rank of a generation that begins."""
        self.close()
        self._islands, self._node = islands, islands.find(rank)[0]
        # Open as long as the generation lasts.
        self._link = open(self._folder / f"node-{self._node}", "wb")  # noqa: SIM115

    def carry(self, nbytes: int, to: int) -> None:
        """Returns when a message to rank `to` may arrive there."""
        same_node = self._islands.find(to)[0] == self._node
        busy_s, more_s = message_s(self._links.at(self.step), nbytes, same_node)
        if same_node or self._link is None:
            time.sleep(busy_s + more_s)
            return
        fcntl.flock(self._link, fcntl.LOCK_EX)
        try:
            time.sleep(busy_s)
        finally:
            fcntl.flock(self._link, fcntl.LOCK_UN)
        time.sleep(more_s)

    def carry_around(self, nbytes: int) -> None:
        """Returns when all messages of the backend's own all-reduce would have arrived."""
        time.sleep(all_reduce_s(self._links.at(self.step), self._islands, nbytes))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def messages_on(wire: Wire) -> type[Messages]:
    """The product's own messages, on this wire. The ledger counts the emulated seconds as it counts real ones."""

    class EmulatedMessages(Messages):
        def __init__(self, group: dist.ProcessGroup, islands: Islands, ledger: CollectiveLedger) -> None:
            super().__init__(group, islands, ledger)
            wire.join(islands, self.rank)
            self.all_reduce = ledger.timed("all_reduce", partial(self._all_reduce, group=group), axis="dp")

        def slowest(self, seconds: list[float], device: torch.device) -> list[float]:
            wire.carry_around(8 * len(seconds))
            return super().slowest(seconds, device)

        def _exchange(self, given: Tensor | None, to: int, taken: Tensor | None = None, source: int = 0) -> None:
            if given is not None:
                wire.carry(given.nbytes, to)
            super()._exchange(given, to, taken, source)

        def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
            wire.carry_around(tensor.nbytes)
            dist.all_reduce(tensor, group=group)

    return EmulatedMessages


@contextmanager
def emulated(wire: Wire) -> Iterator[None]:
    """Within it the gradients of this process travel on `wire`."""
    # The one place where the product makes its messages.
    with mock.patch.object(reduction, "Messages", messages_on(wire)):
        try:
            yield
        finally:
            wire.close()


class Windows(Dataset[Tensor]):
    """`length` bytes each, one after the other."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.length : (index + 1) * self.length].long()


class PairTable(nn.Module):
    """The next byte from the two before it: many parameters and hardly any computation, so that gradients count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(PAIRS, width), nn.Linear(width, 256)

    def forward(self, windows: Tensor) -> Tensor:
        """`windows` is [batch, length] of byte values; returns the mean cross-entropy of each next byte."""
        pairs = 256 * windows[:, :-2] + windows[:, 1:-1]
        logits = self.head(self.table(pairs))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 2:].flatten())


def train(config: dict[str, Any]) -> None:
    """`config["folder"]` is there, on the machine that all emulated nodes share."""
    wire = Wire(Links.of(config["phases"]), Path(config["folder"]))
    with emulated(wire):
        torch.manual_seed(0)
        model = PairTable(config["width"])
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=config["lr"]),
            training_data=Windows(stdlib_bytes(), config["length"]),
        )
        for windows in loader:
            # The context has the steps that are complete: the same number on every rank.
            wire.step = elastic.get_context().step + 1
            loss = engine(windows.to(engine.device))
            engine.backward(loss)
            engine.step()

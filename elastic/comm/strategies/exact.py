"""All-reduce written out on send and receive. Each sums a flat tensor over all ranks, in place, and leaves the same
bits on every rank; any length, any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """Messages between this rank and the others of one group. A message without elements is not sent."""

    rank: int
    ranks: int

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, like: Tensor, source: int) -> Tensor: ...

    def exchange(self, given: Tensor, to: int, like: Tensor, source: int) -> Tensor:
        """Sends `given` while it receives."""
        ...


def ring(tensor: Tensor, wire: Wire) -> None:
    members = range(wire.ranks)
    parts = tensor.tensor_split(wire.ranks)
    reduce_scatter(parts, members, wire)
    all_gather(parts, members, wire)


def tree(tensor: Tensor, wire: Wire) -> None:
    """A binomial tree with rank 0 at its root: sums go up, the result comes down."""
    distances = [1 << level for level in range((wire.ranks - 1).bit_length())]
    for distance in distances:
        if wire.rank % (2 * distance) == distance:
            wire.send(tensor, wire.rank - distance)
            break
        if wire.rank + distance < wire.ranks:
            tensor += wire.receive(tensor, wire.rank + distance)
    for distance in reversed(distances):
        if wire.rank % (2 * distance) == distance:
            tensor.copy_(wire.receive(tensor, wire.rank - distance))
        elif wire.rank % (2 * distance) == 0 and wire.rank + distance < wire.ranks:
            wire.send(tensor, wire.rank + distance)


def hierarchical(tensor: Tensor, wire: Wire, inside: Sequence[int], between: Sequence[int]) -> None:
    """`inside` are the ranks of this rank's node, `between` those at its place in all nodes."""
    parts = tensor.tensor_split(len(inside))
    reduce_scatter(parts, inside, wire)
    shares = parts[own_part(inside, wire.rank)].tensor_split(len(between))
    reduce_scatter(shares, between, wire)
    all_gather(shares, between, wire)
    all_gather(parts, inside, wire)


def own_part(members: Sequence[int], rank: int) -> int:
    """Which part `reduce_scatter` gives to a member."""
    return (members.index(rank) + 1) % len(members)


def reduce_scatter(parts: Sequence[Tensor], members: Sequence[int], wire: Wire) -> None:
    """After it member i has the sum of part i + 1."""
    place, count = members.index(wire.rank), len(members)
    right, left = members[(place + 1) % count], members[place - 1]
    for step in range(count - 1):
        given, taken = parts[(place - step) % count], parts[(place - step - 1) % count]
        taken += wire.exchange(given, right, taken, left)


def all_gather(parts: Sequence[Tensor], members: Sequence[int], wire: Wire) -> None:
    """Begins where `reduce_scatter` ends."""
    place, count = members.index(wire.rank), len(members)
    right, left = members[(place + 1) % count], members[place - 1]
    for step in range(count - 1):
        given, taken = parts[(place + 1 - step) % count], parts[(place - step) % count]
        taken.copy_(wire.exchange(given, right, taken, left))

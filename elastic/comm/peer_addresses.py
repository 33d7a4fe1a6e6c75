"""Which rank is at the other end of a socket: every member of a generation publishes its socket addresses once.

Rank 0 gathers the addresses and hands each rank those that it needs. If every rank asked every other, a thousand ranks
would send a million messages, each as long as the group is large.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from elastic.comm.sockets import Address, TcpSocket

# Rank -> where it listens; rank -> (its own end, the other end) of each connection.
Listening = dict[int, list[Address]]
Connected = dict[int, list[tuple[Address, Address]]]


@dataclass(frozen=True)
class Peers:
    """The other ranks as one rank sees them: where they listen, and the rank at each address that a socket of this
    process may be connected to."""

    listening: frozenset[Address]
    rank_at: Mapping[Address, int]


def exchange(store: Store, prefix: str, rank: int, world_size: int, mine: Sequence[TcpSocket]) -> Peers:
    """Collective over the store; `prefix` names this one exchange. Raises torch's DistError when the store is gone or
    a member does not come in time."""
    store.set(f"{prefix}told/{rank}", _told(mine))
    if rank == 0:
        _hand_out(store, prefix, store.multi_get([f"{prefix}told/{other}" for other in range(world_size)]))
    everywhere, here = store.multi_get([f"{prefix}listening", f"{prefix}to/{rank}"])
    listening = {(host, port): number for number, host, port in json.loads(everywhere) if number != rank}
    connected = {(host, port): number for number, host, port in json.loads(here)}
    return Peers(frozenset(listening), {**connected, **listening})


def toward(listening: Listening, connected: Connected) -> dict[int, list[tuple[int, Address]]]:
    """For each rank: the ranks that are connected to its listening sockets, and from which address. (The other ends are
    known from where the others listen.) Linear in the number of connections."""
    rank_at = {address: rank for rank, addresses in listening.items() for address in addresses}
    found: dict[int, list[tuple[int, Address]]] = {rank: [] for rank in listening}
    for rank, ends in connected.items():
        for own, other in ends:
            target = rank_at.get(other)
            if target is not None and target != rank:
                found[target].append((rank, own))
    return found


def _told(mine: Sequence[TcpSocket]) -> str:
    listening = sorted({found.local for found in mine if found.listening})
    connected = sorted((found.local, found.peer) for found in mine if not found.listening and found.peer is not None)
    return json.dumps([listening, connected])


def _hand_out(store: Store, prefix: str, told: Sequence[bytes]) -> None:
    listening: Listening = {}
    connected: Connected = {}
    for rank, message in enumerate(told):
        where, ends = json.loads(message)
        listening[rank] = [(host, port) for host, port in where]
        connected[rank] = [((own[0], own[1]), (other[0], other[1])) for own, other in ends]
    messages = {f"{prefix}listening": [(rank, *address) for rank, where in listening.items() for address in where]}
    for rank, found in toward(listening, connected).items():
        messages[f"{prefix}to/{rank}"] = [(other, *address) for other, address in found]
    values = [json.dumps(message) for message in messages.values()]
    store.multi_set(list(messages), values)  # type: ignore[attr-defined] # the stub lacks it

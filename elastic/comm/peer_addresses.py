"""Which rank is at the other end of a socket: every member of a generation publishes its socket addresses once.

Rank 0 gathers the addresses and hands each rank those that it needs. If every rank asked every other, a thousand ranks
would send a million messages, each as long as the group is large. A thousand ranks that are all connected have half a
million connections: each is told once, by the end that nobody can know otherwise, as a few bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    store.set(f"{prefix}told/{rank}", _told(mine))  # type: ignore[arg-type] # the stub has text only
    if rank == 0:
        _hand_out(store, prefix, store.multi_get([f"{prefix}told/{other}" for other in range(world_size)]))
    everywhere, here = map(_with_ranks, store.multi_get([f"{prefix}listening", f"{prefix}to/{rank}"]))
    listening = {address: number for number, address in everywhere if number != rank}
    connected = {address: number for number, address in here}
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


def _told(mine: Sequence[TcpSocket]) -> bytes:
    """Where this rank listens, and both ends of the connections that it has made itself: the other ends of those that
    it has accepted are told by who made them."""
    listening = sorted({found.local for found in mine if found.listening})
    ends = [(found.local, found.peer) for found in mine if not found.listening and found.peer is not None]
    made = sorted(end for end in ends if end[0] not in listening)
    return _packed([_columns(listening), _columns([own for own, _ in made]), _columns([other for _, other in made])])


def _hand_out(store: Store, prefix: str, told: Sequence[bytes]) -> None:
    listening: Listening = {}
    connected: Connected = {}
    for rank, message in enumerate(told):
        listening[rank], own, other = map(_addresses, _unpacked(message))
        connected[rank] = list(zip(own, other, strict=True))
    everywhere = [(rank, address) for rank, where in listening.items() for address in where]
    messages = {f"{prefix}listening": everywhere}
    messages |= {f"{prefix}to/{rank}": found for rank, found in toward(listening, connected).items()}
    values = [_packed([[rank for rank, _ in found], _columns([a for _, a in found])]) for found in messages.values()]
    store.multi_set(list(messages), values)  # type: ignore[attr-defined] # the stub lacks it


def _with_ranks(message: bytes) -> list[tuple[int, Address]]:
    ranks, columns = _unpacked(message)
    return list(zip(ranks, _addresses(columns), strict=True))


def _columns(addresses: Sequence[Address]) -> tuple[list[str], list[int], list[int]]:
    """The hosts, each once; of each address the index of its host; and its port."""
    hosts: dict[str, int] = {}
    at = [hosts.setdefault(host, len(hosts)) for host, _ in addresses]
    return list(hosts), at, [port for _, port in addresses]


def _addresses(columns: tuple[list[str], list[int], list[int]]) -> list[Address]:
    hosts, at, ports = columns
    return [(hosts[index], port) for index, port in zip(at, ports, strict=True)]


def _packed(values: Any) -> bytes:
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode(), 1)


def _unpacked(message: bytes) -> Any:
    return json.loads(zlib.decompress(message))

"""Snapshots in the memory of nodes: where replicas go, which snapshot can be put together again, how often to take one.

Pure functions and plain data. What moves the bytes is in `elastic/checkpoint/memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.core.errors import IntegrityError
from elastic.core.names import checkpoint_id, parse_checkpoint_id

_PREFIX = "memory:"
# The key under which a rank's latest step reports travel with its part of a snapshot.
STEPS = "steps"


@dataclass(frozen=True, order=True)
class Held:
    """One node's complete copy of one rank's shard of a snapshot."""

    generation: int
    step: int
    rank: int
    world_size: int
    replica: bool


@dataclass(frozen=True, order=True)
class Snapshot:
    """One that can be put together from what nodes hold; ordered by age. `holders[rank]` is the node to read from."""

    step: int
    generation: int
    holders: tuple[str, ...]

    @property
    def id(self) -> str:
        return snapshot_id(self.step, self.generation)


def snapshot_id(step: int, generation: int) -> str:
    """Tells a snapshot in memory from the checkpoint of the same step in storage: one may be refused, not the other."""
    return f"{_PREFIX}{checkpoint_id(step, generation)}"


def is_snapshot(identifier: str) -> bool:
    return identifier.startswith(_PREFIX)


def parse_snapshot_id(identifier: str) -> tuple[int, int]:
    """(step, generation). Raises IntegrityError for anything else."""
    if not is_snapshot(identifier):
        raise IntegrityError(f"{identifier!r} does not name a snapshot in memory")
    ref = parse_checkpoint_id(identifier[len(_PREFIX) :])
    return ref.step, ref.generation


def recoverable(held: Mapping[str, Iterable[Held]]) -> tuple[Snapshot, ...]:
    """Every snapshot of which some node holds each rank's shard, newest first. `held` is by node.

    A rank's own node is preferred to its replicas: there the shard was copied once and never sent.
    """
    found: dict[tuple[int, int, int], dict[int, tuple[bool, str]]] = {}
    for node in sorted(held):
        for copy in held[node]:
            shards = found.setdefault((copy.step, copy.generation, copy.world_size), {})
            if copy.rank not in shards or (copy.replica, node) < shards[copy.rank]:
                shards[copy.rank] = (copy.replica, node)
    whole = [
        Snapshot(step, generation, tuple(shards[rank][1] for rank in range(world_size)))
        for (step, generation, world_size), shards in found.items()
        if shards.keys() >= set(range(world_size))
    ]
    # Of one step the newest generation's: what came before it was rolled back.
    return tuple(sorted(whole, key=lambda snapshot: (snapshot.generation, snapshot.step), reverse=True))


def place_replicas(
    nodes: Sequence[str], count: int, domains: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], ...]:
    """For each rank the nodes that get a replica of its shard: never its own, `count` different ones where there are.

    `nodes[rank]` is the rank's node; `domains` maps nodes to failure domains (rack, zone). Nodes stand in a ring, in
    an order in which neighbours are in different domains as far as that is possible; node i's shards go to those that
    follow it, other domains first, and first of all a domain that no other copy of the shard is in.

    With `count` replicas on different nodes, any `count` nodes may be lost at once. Where every domain is at most half
    of the nodes, a whole domain may be.
    """
    ring = _ring(sorted(set(nodes), key=nodes.index), domains or {})
    chosen = {node: _followers(ring, at, count, domains or {}) for at, node in enumerate(ring)}
    return tuple(chosen[node] for node in nodes)


def _ring(nodes: Sequence[str], domains: Mapping[str, str]) -> list[str]:
    """Domain by domain, largest first. Half a turn away from a node is then another domain, if no domain is more than
    half of all: that is where replicas are looked for (`_followers`), and each node gets as many as it gives."""
    members: dict[str, list[str]] = {}
    for node in nodes:
        members.setdefault(domains.get(node, node), []).append(node)
    return [node for _, group in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])) for node in group]


def _followers(ring: Sequence[str], at: int, count: int, domains: Mapping[str, str]) -> tuple[str, ...]:
    size = len(ring)
    largest = max(_sizes(ring, domains).values())
    # The same stride for every node, so that nobody holds more replicas than others. A stride of the largest domain's
    # size leaves every domain that is not itself larger than half of the ring.
    strides = [(largest + turn) % size for turn in range(size)]
    order = [ring[(at + stride) % size] for stride in strides if stride]
    taken: list[str] = []
    used = {domains.get(ring[at], ring[at])}
    for fresh in (True, False):
        for node in order:
            domain = domains.get(node, node)
            if len(taken) < count and node not in taken and (not fresh or domain not in used):
                taken.append(node)
                used.add(domain)
    return tuple(taken)


def _sizes(ring: Sequence[str], domains: Mapping[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for node in ring:
        sizes[domains.get(node, node)] = sizes.get(domains.get(node, node), 0) + 1
    return sizes

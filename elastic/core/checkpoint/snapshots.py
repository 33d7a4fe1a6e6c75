"""Snapshots in the memory of nodes: where replicas go, which snapshot can be put together again, how often to take one.

Pure functions and plain data. What moves the bytes is in `elastic/checkpoint/memory`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from elastic.core.errors import IntegrityError
from elastic.core.names import checkpoint_id, parse_checkpoint_id

_PREFIX = "memory:"
# The key under which a rank's latest step reports travel with its part of a snapshot; see `steps_to_json`.
STEPS = "steps"


@dataclass(frozen=True, order=True)
class Held:
    """One node's complete copy of one rank's shard of a snapshot, or what it can make one of.

    With `stripe` the node holds the XOR of the shards of those ranks, this one among them: the shard can be had there
    as long as all the others' are held somewhere. `count`: the same of so many ranks, beginning with `rank`, see
    `together`; of a stripe it is 1.
    """

    generation: int
    step: int
    rank: int
    world_size: int
    replica: bool
    stripe: tuple[int, ...] = ()
    count: int = 1

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks whose shards must be there to make this one of parity."""
        return tuple(rank for rank in self.stripe if rank != self.rank)

    @property
    def stop(self) -> int:
        """The rank after the last."""
        return self.rank + self.count


def together(held: Iterable[Held]) -> tuple[Held, ...]:
    """The same in fewer records, ordered: consecutive ranks' as one. A node of eight ranks tells four instead of 32."""
    found: list[Held] = []
    for copy in sorted(held, key=lambda one: (_kind(one), one.rank)):
        before = found[-1] if found and not copy.stripe else None
        if before and _kind(before) == _kind(copy) and before.stop == copy.rank:
            found[-1] = replace(before, count=before.count + copy.count)
        else:
            found.append(copy)
    return tuple(found)


def _kind(held: Held) -> tuple[Any, ...]:
    return held.generation, held.step, held.world_size, held.replica, held.stripe


def one_by_one(held: Iterable[Held]) -> tuple[Held, ...]:
    """A record for each rank."""
    return tuple(replace(copy, rank=rank, count=1) for copy in held for rank in range(copy.rank, copy.stop))


@dataclass(frozen=True, order=True)
class Snapshot:
    """One that can be put together from what nodes hold; ordered by age. `copies[rank]` are the nodes that have that
    rank's shard, the one to read it from first."""

    step: int
    generation: int
    copies: tuple[tuple[str, ...], ...]

    @property
    def id(self) -> str:
        return snapshot_id(self.step, self.generation)

    @property
    def holders(self) -> tuple[str, ...]:
        """For each rank the node to read from, for readers that have no copy on their own."""
        return tuple(nodes[0] for nodes in self.copies)


Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Copies:
    """What each node holds of a snapshot of `ranks` ranks: (node, ranks to be read from there, other ranks of which it
    has a copy); ranks as spans (first, last + 1)."""

    ranks: int = 0
    nodes: tuple[tuple[str, Spans, Spans], ...] = ()


def copies_of(snapshot: Snapshot) -> Copies:
    held: dict[str, tuple[list[int], list[int]]] = {}
    for rank, nodes in enumerate(snapshot.copies):
        for at, node in enumerate(nodes):
            held.setdefault(node, ([], []))[min(at, 1)].append(rank)
    return Copies(
        len(snapshot.copies), tuple((node, _spans(first), _spans(others)) for node, (first, others) in held.items())
    )


def _spans(ranks: Iterable[int]) -> Spans:
    """`ranks` grow."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank:
            spans[-1] = (spans[-1][0], rank + 1)
        else:
            spans.append((rank, rank + 1))
    return tuple(spans)


def steps_to_json(world_size: int, by_rank: Mapping[str, Any]) -> dict[str, Any]:
    """The step reports of ranks, for `STEPS`."""
    return {"world_size": world_size, "ranks": dict(by_rank)}


def steps_of(extras: Iterable[Mapping[str, Any] | None]) -> tuple[int, dict[int, Sequence[Mapping[str, Any]]]]:
    """The world size, and the latest step reports of each rank, from what was saved with the shards of a snapshot."""
    told = [extra[STEPS] for extra in extras if extra and STEPS in extra]
    found = {int(rank): steps for each in told for rank, steps in each["ranks"].items()}
    return max((each["world_size"] for each in told), default=0), found


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


def generation_of(identifier: str) -> int:
    """In which a snapshot, or a checkpoint in storage, was saved. Raises IntegrityError for anything else."""
    return parse_checkpoint_id(identifier.removeprefix(_PREFIX)).generation


def recoverable(held: Mapping[str, Iterable[Held]]) -> tuple[Snapshot, ...]:
    """Every snapshot of which each rank's shard is on some node, or can be made there of parity; newest first.

    `held` is by node. A rank's own node is preferred to its replicas: there the shard was copied once and never sent.
    """
    return found_and_missing(held)[0]


def not_whole(held: Mapping[str, Iterable[Held]]) -> tuple[str, ...]:
    """For each snapshot newer than the first `recoverable` one, newest first, a sentence on what is missing of it."""
    return found_and_missing(held)[1]


def found_and_missing(held: Mapping[str, Iterable[Held]]) -> tuple[tuple[Snapshot, ...], tuple[str, ...]]:
    """`recoverable` and `not_whole`, by one look at what the nodes hold."""
    found = _holders(held)
    whole = [
        Snapshot(step, generation, tuple(shards)) for (step, generation, _), shards in found.items() if all(shards)
    ]
    # Of one step the newest generation's: what came before it was rolled back.
    whole.sort(key=lambda snapshot: (snapshot.generation, snapshot.step), reverse=True)
    after = (whole[0].generation, whole[0].step) if whole else (-1, -1)
    sentences = []
    for key in sorted(found, key=lambda key: (key[1], key[0]), reverse=True):
        step, generation, _ = key
        if (generation, step) <= after:
            break
        missing = [rank for rank, nodes in enumerate(found[key]) if not nodes]
        if missing:
            ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            sentences.append(
                f"snapshot {snapshot_id(step, generation)} is not whole: no node that answers has the shard of {ranks} "
                "or the parity and all other shards to make it of"
            )
    return tuple(whole), tuple(sentences)


@dataclass
class _Columns:
    """The nodes that have the shards of a snapshot of `size` ranks. Of each rank the n-th one is in the n-th column, so
    that those of many ranks are entered and read at once."""

    size: int
    own: list[list[str]] = field(default_factory=list)
    replicas: list[list[str]] = field(default_factory=list)

    def enter(self, node: str, copy: Held) -> None:
        self._enter(self.replicas if copy.replica else self.own, node, copy.rank, copy.stop)

    def _enter(self, columns: list[list[str]], node: str, first: int, stop: int) -> None:
        for column in columns:
            free = column[first:stop].count("")
            if free == stop - first:
                break
            if free:
                for rank in range(first, stop):
                    self._enter(columns, node, rank, rank + 1)
                return
        else:
            column = [""] * self.size
            columns.append(column)
        column[first:stop] = [node] * (stop - first)

    def nodes(self) -> list[tuple[str, ...]]:
        """By rank, own copies first; none where nobody has it. A node may have rebuilt its own rank's shard."""
        columns = self.own + self.replicas
        if not columns:
            return [()] * self.size
        return [tuple(dict.fromkeys(filter(None, nodes))) for nodes in zip(*columns, strict=True)]


def _holders(held: Mapping[str, Iterable[Held]]) -> dict[tuple[int, int, int], list[tuple[str, ...]]]:
    """(step, generation, world size) -> by rank the nodes to have its shard from, the best one first."""
    copies: dict[tuple[int, int, int], _Columns] = {}
    parity: dict[tuple[int, int, int], dict[int, list[tuple[str, Held]]]] = {}
    for node in sorted(held):
        for copy in held[node]:
            key = (copy.step, copy.generation, copy.world_size)
            if key not in copies:
                copies[key] = _Columns(copy.world_size)
            if copy.stripe:
                parity.setdefault(key, {}).setdefault(copy.rank, []).append((node, copy))
            else:
                copies[key].enter(node, copy)
    found = {key: columns.nodes() for key, columns in copies.items()}
    for key, offers in parity.items():
        # Of shards that are there as they are: of two that are missing in one stripe none can be made.
        there = [bool(nodes) for nodes in found[key]]
        for rank, offered in offers.items():
            nodes = [node for node, copy in offered if all(there[other] for other in copy.others)]
            if nodes and not there[rank]:
                found[key][rank] = (nodes[0],)
    return found


def place_replicas(
    nodes: Sequence[str],
    count: int,
    domains: Mapping[str, str] | None = None,
    spare: int = 0,
    shares: Mapping[str, Hashable] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """For each rank the nodes that get a replica of its shard: never its own, `count` different ones where there are;
    and after these up to `spare` others that come next.

    `nodes[rank]` is the rank's node; `domains` maps nodes to failure domains (rack, zone). Nodes stand in a ring in the
    order of ranks, and node i's shards go to those before it: the state next to their own, which moves in when the
    world shrinks, so that ranks stay where they are (`core.sharding.placement`). Where that would put two copies of a
    shard into one domain, the ring has an order in which neighbours are in different domains as far as that is
    possible, and shards go to other domains first, and first of all to a domain that no other copy of the shard is in.
    Nodes have `shares` of the model (all the same: None), stages of a pipeline, say. Those that have the same are a
    ring of their own, as they read each other's state when the world changes; where one of them is too small, or
    copies of a shard would be in one domain for it, all are one ring.

    With `count` replicas on different nodes, any `count` nodes may be lost at once. Where every domain is at most half
    of the nodes, a whole domain may be.
    """
    names, domains = list(dict.fromkeys(nodes)), domains or {}
    if len({domains.get(node, node) for node in names}) == 1:
        domains = {}  # There is no other one to look for.
    together = {} if shares is None else _by_share(names, count, domains, spare, shares)
    ring, largest = names[::-1], 1
    if not _apart(ring, count, domains):
        ring = _ring(names, domains)
        largest = max(_sizes(ring, domains).values(), default=0)
    chosen = {node: _followers(ring, at, count + spare, largest, domains) for at, node in enumerate(ring)}
    if together and _in_one_domain(together, count, domains) <= _in_one_domain(chosen, count, domains):
        chosen = together
    return tuple(chosen[node] for node in nodes)


def _by_share(
    names: Sequence[str], count: int, domains: Mapping[str, str], spare: int, shares: Mapping[str, Hashable]
) -> dict[str, tuple[str, ...]]:
    """Of each node its followers among those with the same share; none where these are too few."""
    groups: dict[Hashable, list[str]] = {}
    for node in names:
        groups.setdefault(shares[node], []).append(node)
    if min(map(len, groups.values())) <= count:
        return {}
    placed = (zip(group, place_replicas(group, count, domains, spare), strict=True) for group in groups.values())
    return dict(chain.from_iterable(placed))


def _in_one_domain(chosen: Mapping[str, Sequence[str]], count: int, domains: Mapping[str, str]) -> int:
    """How many copies of shards are in a domain in which another one is."""
    copies = ([domains.get(each, each) for each in (node, *found[:count])] for node, found in chosen.items())
    return sum(len(each) - len(set(each)) for each in copies)


def _apart(ring: Sequence[str], count: int, domains: Mapping[str, str]) -> bool:
    """Is every node in another domain than the `count` that follow it, and each of these in another than the rest?"""
    kinds = [domains.get(node, node) for node in ring]
    return len(ring) > count and all(
        len({kinds[(at + stride) % len(ring)] for stride in range(count + 1)}) == count + 1 for at in range(len(ring))
    )


def _ring(nodes: Sequence[str], domains: Mapping[str, str]) -> list[str]:
    """Domain by domain, largest first, else in the order of ranks, whatever the nodes are called. Half a turn away from
    a node is another domain, if no domain is more than half of all: that is where replicas are looked for
    (`_followers`), and each node gets as many as it gives."""
    members: dict[str, list[str]] = {}
    for node in nodes:
        members.setdefault(domains.get(node, node), []).append(node)
    return [node for group in sorted(members.values(), key=len, reverse=True) for node in group]


def _followers(ring: Sequence[str], at: int, count: int, largest: int, domains: Mapping[str, str]) -> tuple[str, ...]:
    size = len(ring)
    # The same stride for every node, so that no node holds more replicas than others. A stride of the largest domain's
    # size leaves every domain that is not itself larger than half of the ring.
    strides = (largest, size), (1, largest)
    taken: list[str] = []
    used = {domains.get(ring[at], ring[at])}
    for fresh in (True, False):
        for stride in (stride for begin, end in strides for stride in range(begin, end)):
            if len(taken) == count:
                return tuple(taken)
            node = ring[(at + stride) % size]
            domain = domains.get(node, node)
            if node not in taken and (not fresh or domain not in used):
                taken.append(node)
                used.add(domain)
    return tuple(taken)


def _sizes(ring: Sequence[str], domains: Mapping[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for node in ring:
        sizes[domains.get(node, node)] = sizes.get(domains.get(node, node), 0) + 1
    return sizes

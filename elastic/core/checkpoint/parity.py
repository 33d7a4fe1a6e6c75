"""Parity instead of replicas: which shards are XORed together, and which node keeps the result.

A *stripe* is a set of ranks on different nodes. One more node keeps the XOR of their shards, padded with zeros to the
longest: any one of them can then be had again from the others. That is RAID-5 (Patterson, Gibson and Katz 1988) over
nodes: the stripes' parity goes round, so that no node keeps more of it than others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stripe:
    """`holder` is a node of none of the `ranks`."""

    ranks: tuple[int, ...]
    holder: str


def place_parity(
    nodes: Sequence[str], width: int, domains: Mapping[str, str] | None = None
) -> tuple[Stripe | None, ...]:
    """For each rank its stripe, of at most `width` ranks; None where there is no second node.

    `nodes[rank]` is the rank's node; `domains` maps nodes to failure domains (rack, zone). No node has two parts of a
    stripe, so any one node may be lost. No domain has, where domains are no larger than there are stripes next to each
    other and there are more of them than a stripe has ranks: any one domain may be lost then.

    With N nodes a stripe has at most N - 1 ranks, and stripes are of even size: four nodes with a width of 3 make two
    stripes of two. A stripe of one rank is a full copy.
    """
    domains = domains or {}
    names = sorted(set(nodes), key=nodes.index)
    placed: list[Stripe | None] = [None] * len(nodes)
    width = min(width, len(names) - 1)
    if width < 1:
        return tuple(placed)
    load = dict.fromkeys(names, 0)
    for turn, row in enumerate(_rows(nodes)):
        ring = _ring(list(row), domains, turn)
        count = -(-len(ring) // width)
        # Nodes of one domain stand together in the ring, and go to different stripes that way.
        groups = [ring[first::count] for first in range(count)]
        for members, holder in _held(groups, names, load, domains):
            stripe = Stripe(tuple(sorted(row[node] for node in members)), holder)
            for rank in stripe.ranks:
                placed[rank] = stripe
    return tuple(placed)


def _rows(nodes: Sequence[str]) -> list[dict[str, int]]:
    """Row r has the r-th rank of every node that has so many."""
    rows: list[dict[str, int]] = []
    for rank, node in enumerate(nodes):
        at = next((row for row in rows if node not in row), None)
        if at is None:
            rows.append(at := {})
        at[node] = rank
    return rows


def _ring(nodes: Sequence[str], domains: Mapping[str, str], turn: int) -> list[str]:
    """Domain by domain, beginning with another one each turn: not always the same nodes are in the smaller stripes."""
    members: dict[str, list[str]] = {}
    for node in nodes:
        members.setdefault(domains.get(node, node), []).append(node)
    groups = list(members.values())
    turn %= len(groups)
    return [node for group in groups[turn:] + groups[:turn] for node in group]


def _held(
    groups: Sequence[Sequence[str]], names: Sequence[str], load: dict[str, int], domains: Mapping[str, str]
) -> Iterator[tuple[Sequence[str], str]]:
    """A holder for each group, counted in `load`: never one of its nodes, and of the others one that keeps least."""
    waiting = list(groups)
    while waiting:
        least = min(load.values())
        idle = {node for node in names if load[node] == least}
        # The group that has the fewest such nodes to choose from is first: the others still find one then.
        members = max(waiting, key=lambda group: sum(node in idle for node in group))
        waiting.remove(members)
        begin = names.index(members[0])
        holder = _holder(members, [*names[begin:], *names[:begin]], load, least, domains)
        load[holder] += 1
        yield members, holder


def _holder(
    members: Sequence[str], names: Sequence[str], load: Mapping[str, int], least: int, domains: Mapping[str, str]
) -> str:
    # A domain that has two parts already is lost with them whatever happens: a third there does no harm.
    single = {domain for domain, count in Counter(domains.get(node, node) for node in members).items() if count == 1}
    holder, lowest = "", (True, math.inf)
    for node in (node for node in names if node not in members):
        cost = (domains.get(node, node) in single, load[node])
        if cost < lowest:
            holder, lowest = node, cost
        if cost == (False, least):
            break  # None is better: of a thousand nodes few are looked at.
    return holder

"""Quarantined nodes: the run continues without them for a while instead of failing on them again.

A node that could not be reached by another, that was lost again and again, or that was given up, is left alone for a
time that doubles with every further strike. A strike is forgotten when the node has been in good order for as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A node may be lost once without being suspected of anything: a second time within this many seconds is a pattern.
_PATTERN_S = 600.0


@dataclass(frozen=True)
class Strikes:
    """The strikes against one node. `until`: it is quarantined until then (0: it is not quarantined)."""

    count: int
    last: float
    until: float = 0.0


Quarantine = Mapping[str, Strikes]


def struck(
    quarantine: Quarantine, node: str, now: float, base_s: float, limit_s: float, *, certain: bool
) -> dict[str, Strikes]:
    """The table after one more strike against `node`. `certain`: the first strike quarantines it."""
    old = quarantine.get(node)
    count = 1 if old is None or now - max(old.last, old.until) > _PATTERN_S else old.count + 1
    rounds = count if certain else count - 1
    pause_s = min(limit_s, base_s * 2.0 ** min(rounds - 1, 30)) if rounds > 0 else 0.0
    # Nodes that are gone for good never come back to be forgiven.
    recent = {name: old for name, old in quarantine.items() if now - max(old.last, old.until) <= _PATTERN_S}
    return {**recent, node: Strikes(count, now, now + pause_s if pause_s else 0.0)}


def avoided(quarantine: Quarantine, now: float) -> tuple[str, ...]:
    """The quarantined nodes, in a fixed order."""
    return tuple(sorted(node for node, strikes in quarantine.items() if strikes.until > now))


def next_release(quarantine: Quarantine, now: float) -> float | None:
    """When the next node may be asked for again."""
    return min((strikes.until for strikes in quarantine.values() if strikes.until > now), default=None)


def left_out(nodes: Iterable[str], unreachable: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The fewest nodes, as far as a greedy choice finds them, without which all others reach each other.

    `nodes` in the order in which they are worth keeping: of two that cannot talk and are alike otherwise, the later
    one goes. Pairs count in both directions.
    """
    order = {node: place for place, node in enumerate(nodes)}
    pairs = {frozenset(pair) for pair in unreachable if pair[0] != pair[1] and set(pair) <= order.keys()}
    chosen: list[str] = []
    while pairs:
        degree: dict[str, int] = {}
        for pair in pairs:
            for node in pair:
                degree[node] = degree.get(node, 0) + 1
        worst = max(degree, key=lambda node: (degree[node], order[node]))
        chosen.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(chosen)

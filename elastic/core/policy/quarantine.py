"""Quarantined nodes: the run continues without them for a while instead of failing on them again.

A node that could not be reached by another, that was lost again and again, or that was given up, is quarantined for a
time that doubles with every further strike. A strike is forgotten when the node has been in good order for as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.tables import Table, bucket_of

# A node may be lost once without being suspected of anything: a second time within this many seconds is a pattern.
_PATTERN_S = 600.0


@dataclass(frozen=True)
class Strikes:
    """The strikes against one node. `until`: it is quarantined until then (0: it is not quarantined)."""

    count: int
    last: float
    until: float = 0.0


class Quarantine(Mapping[str, Strikes]):
    """The strikes against each node. Successors share what has not changed: half a cluster may be lost at once."""

    __slots__ = ("_by_name", "_closed", "_size")
    JSON_FORM = Mapping[str, Strikes]

    def __init__(self, strikes: Mapping[str, Strikes] | None = None) -> None:
        known = strikes or {}
        by_bucket: dict[int, dict[str, Strikes]] = {}
        for name, against in known.items():
            by_bucket.setdefault(bucket_of(name), {})[name] = against
        self._by_name: Table[Mapping[str, Strikes]] = Table(by_bucket)
        # The few that were quarantined, and until when.
        self._closed: Mapping[str, float] = {name: against.until for name, against in known.items() if against.until}
        self._size = len(known)

    def with_strikes(self, node: str, strikes: Strikes) -> Quarantine:
        """`strikes` against `node`. Nodes that are gone for good never come back to be forgiven: those beside it in
        the table that are forgiven by now are dropped."""
        number, now = bucket_of(node), strikes.last
        before = self._by_name.get(number, {})
        kept = {name: old for name, old in before.items() if not _forgiven(old, now)}
        made = object.__new__(Quarantine)
        made._by_name = self._by_name.put({number: {**kept, node: strikes}})
        made._closed = self._closed
        if strikes.until or node in made._closed:
            made._closed = {name: until for name, until in self._closed.items() if until > now and name != node}
            made._closed |= {node: strikes.until} if strikes.until else {}
        made._size = self._size - len(before) + len({**kept, node: strikes})
        return made

    def closed(self, now: float) -> Iterator[tuple[str, float]]:
        """The nodes that are quarantined, and until when."""
        return ((node, until) for node, until in self._closed.items() if until > now)

    def __getitem__(self, node: str) -> Strikes:
        bucket: Mapping[str, Strikes] = self._by_name.get(bucket_of(node), {})
        return bucket[node]

    def get(self, node: str, default: Any = None) -> Any:
        return self._by_name.get(bucket_of(node), {}).get(node, default)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, str) and node in self._by_name.get(bucket_of(node), {})

    def __iter__(self) -> Iterator[str]:
        for bucket in self._by_name.values():
            yield from bucket

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Quarantine({dict(self.items())!r})"


def struck(
    quarantine: Quarantine, node: str, now: float, base_s: float, limit_s: float, *, certain: bool
) -> Quarantine:
    """The table after one more strike against `node`. `certain`: the first strike quarantines it."""
    old = quarantine.get(node)
    count = 1 if old is None or _forgiven(old, now) else old.count + 1
    rounds = count if certain else count - 1
    pause_s = min(limit_s, base_s * 2.0 ** min(rounds - 1, 30)) if rounds > 0 else 0.0
    return quarantine.with_strikes(node, Strikes(count, now, now + pause_s if pause_s else 0.0))


def _forgiven(strikes: Strikes, now: float) -> bool:
    return now - max(strikes.last, strikes.until) > _PATTERN_S


def avoided(quarantine: Quarantine, now: float) -> tuple[str, ...]:
    """The quarantined nodes, in a fixed order."""
    return tuple(sorted(node for node, _ in quarantine.closed(now)))


def next_release(quarantine: Quarantine, now: float) -> float | None:
    """When the next node may be asked for again."""
    return min((until for _, until in quarantine.closed(now)), default=None)


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

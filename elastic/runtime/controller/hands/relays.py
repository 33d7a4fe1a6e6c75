"""Which node's agent passes on the quiet heartbeats, the step reports and the commands of which other nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from elastic.core.fleet import Slots

# A changed fleet is looked at again after this long: while ten thousand nodes start, it changes with every beat. Until
# then a node may be told a relay that has left, which it finds out by asking it.
AGAIN_AFTER_S = 1.0


class Nodes(Protocol):
    @property
    def slots(self) -> Slots: ...

    @property
    def nodes(self) -> tuple[str, ...]: ...


class Relays:
    """In a fleet of more than `per_relay` nodes every group of so many, in the order of their slots, has its first one
    as relay. 0: no fleet has relays. Nobody has to be told of a change: who has a relay keeps it while it is there.
    """

    def __init__(self, per_relay: int) -> None:
        self._per_relay = per_relay
        self._slots = Slots()
        self._of: Mapping[str, str] = {}
        self._at = 0.0

    def of(self, node: str, fleet: Nodes, now: float) -> str | None:
        """The relay of `node`; None where it speaks for itself, as the relays do."""
        relay = self.over(node, fleet, now)
        return None if relay == node else relay

    def over(self, node: str, fleet: Nodes, now: float) -> str | None:
        """The relay of the group of `node`, which may be `node` itself; None where it is in none."""
        if not self._per_relay or len(fleet.slots) <= self._per_relay:
            return None
        if fleet.slots is not self._slots and (not self._of or now - self._at >= AGAIN_AFTER_S):
            self._slots, self._at = fleet.slots, now
            self._of = _groups(fleet.nodes, self._per_relay, self._of)
        return self._of.get(node)


def _groups(nodes: Sequence[str], size: int, before: Mapping[str, str]) -> dict[str, str]:
    """The relay by node. Who had a relay keeps it; the others fill up groups, then form new ones."""
    if len(nodes) <= size:
        return {}
    here = set(nodes)
    kept = {node: relay for node in nodes if (relay := before.get(node)) in here and relay is not None}
    taken = Counter(kept.values())
    room = [relay for relay, count in taken.items() for _ in range(size - count)]
    rest = [node for node in nodes if node not in kept]
    filled, fresh = rest[: len(room)], rest[len(room) :]
    new = {node: fresh[place - place % size] for place, node in enumerate(fresh)}
    return {**kept, **dict(zip(filled, room, strict=False)), **new}

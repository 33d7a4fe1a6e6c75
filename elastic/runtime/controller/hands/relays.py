"""Which node's agent passes on the quiet heartbeats and the step reports of which other nodes."""

from __future__ import annotations

from collections.abc import Mapping
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
    as relay. 0: no fleet has relays. Nobody has to be told of a change: who has a relay keeps it while it answers.
    """

    def __init__(self, per_relay: int) -> None:
        self._per_relay = per_relay
        self._slots = Slots()
        self._of: Mapping[str, str] = {}
        self._at = 0.0

    def of(self, node: str, fleet: Nodes, now: float) -> str | None:
        """The relay of `node`; None where it speaks for itself, as the relays do."""
        if not self._per_relay or len(fleet.slots) <= self._per_relay:
            return None
        if fleet.slots is not self._slots and (not self._of or now - self._at >= AGAIN_AFTER_S):
            self._slots, self._at = fleet.slots, now
            self._of = _groups(fleet.nodes, self._per_relay)
        relay = self._of.get(node)
        return None if relay == node else relay


def _groups(nodes: tuple[str, ...], size: int) -> dict[str, str]:
    if len(nodes) <= size:
        return {}
    return {node: nodes[place - place % size] for place, node in enumerate(nodes)}

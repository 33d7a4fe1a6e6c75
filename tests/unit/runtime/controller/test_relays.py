"""Relays of a fleet: which node has which one, in groups, and in fleets that change."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elastic.core.fleet import Slot, SlotPhase, Slots
from elastic.runtime.controller.hands.relays import AGAIN_AFTER_S, Relays


@dataclass(frozen=True)
class Fleet:
    slots: Slots

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.node for slot in self.slots.values() if slot.node is not None))


def fleet(nodes: list[str]) -> Fleet:
    slots = Slots()
    for number, node in enumerate(nodes):
        slots = slots.put({number: Slot(number, SlotPhase.PLACED, 0.0, node=node)})
    return Fleet(slots)


def relays(of: Relays, known: Fleet, now: float = 0.0) -> list[str | None]:
    return [of.of(node, known, now) for node in known.nodes]


@pytest.mark.parametrize("per_relay", [0, 4, 5])
def test_a_small_fleet_and_one_that_wants_none_has_no_relays(per_relay: int) -> None:
    assert relays(Relays(per_relay), fleet(list("abcd"))) == [None] * 4


def test_the_first_of_each_group_passes_on_what_the_others_say() -> None:
    assert relays(Relays(3), fleet(list("abcdefg"))) == [None, "a", "a", None, "d", "d", None]


def test_several_slots_on_few_nodes_need_no_relay() -> None:
    assert relays(Relays(3), fleet(list("aabbcc"))) == [None] * 3


def test_a_changed_fleet_is_looked_at_again_after_a_while_and_a_stranger_has_no_relay() -> None:
    of = Relays(2)
    assert relays(of, fleet(list("abcd"))) == [None, "a", None, "c"]
    later = fleet(list("bcde"))
    assert relays(of, later, AGAIN_AFTER_S / 2) == ["a", None, "c", None], "e is not known yet; b finds out"
    assert relays(of, later, AGAIN_AFTER_S) == [None, None, "c", "b"], "c and d keep what they have"
    assert [of.over(node, later, AGAIN_AFTER_S) for node in later.nodes] == ["b", "c", "c", "b"]
    assert of.of("x", later, AGAIN_AFTER_S) is None

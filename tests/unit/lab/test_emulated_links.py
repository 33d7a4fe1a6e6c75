"""Emulated links: what a message and an all-reduce take, the phase of a step, and what is no link."""

from __future__ import annotations

from typing import Any

import pytest
from emulated_links import Links, all_reduce_s, message_s

from elastic.core.errors import UsageError
from elastic.core.policy.hops import Islands

FAST, SLOW = {"latency_ms": 1, "mb_per_s": 1000}, {"latency_ms": 4, "mb_per_s": 10.0}
PAIRS = Islands(((0, 1), (2, 3)))


def phase(name: str = "first", from_step: object = 1, node: Any = FAST, nodes: Any = FAST) -> dict[str, Any]:
    return {"name": name, "from_step": from_step, "node": node, "nodes": nodes}


def test_a_message_has_its_link_for_its_bytes_and_arrives_later() -> None:
    (mixed,) = Links.of([phase(nodes=SLOW)]).phases
    assert message_s(mixed, 2e6, same_node=True) == pytest.approx((2e-3, 1e-3))
    assert message_s(mixed, 2e6, same_node=False) == pytest.approx((0.2, 4e-3))
    assert message_s(mixed, 0, same_node=False) == pytest.approx((0.0, 4e-3))


@pytest.mark.parametrize(
    ("islands", "seconds"),
    [
        # 6 messages of 1 MB, and in each turn one that leaves each node: 4 ms and 100 ms.
        pytest.param(PAIRS, 6 * 0.104, id="neighbours-share-a-node"),
        # All leave their node, two at a time.
        pytest.param(Islands(((0, 2), (1, 3))), 6 * 0.204, id="neighbours-never-share-a-node"),
        pytest.param(Islands(((0, 1, 2, 3),)), 6 * 0.002, id="one-node"),
        # Two messages of 2 MB.
        pytest.param(Islands(((0,), (1,))), 2 * 0.204, id="two-nodes-of-one"),
        pytest.param(Islands(((0,),)), 0.0, id="nobody-else"),
    ],
)
def test_an_all_reduce_is_a_ring_over_its_slowest_link(islands: Islands, seconds: float) -> None:
    (mixed,) = Links.of([phase(nodes=SLOW)]).phases
    assert all_reduce_s(mixed, islands, 4e6) == pytest.approx(seconds)


def test_links_within_a_node_may_be_the_slow_ones() -> None:
    (mixed,) = Links.of([phase(node=SLOW)]).phases
    assert all_reduce_s(mixed, PAIRS, 4e6) == pytest.approx(6 * 0.104)


def test_a_phase_lasts_until_the_next_one_begins() -> None:
    links = Links.of([phase("a"), phase("b", 5, nodes=SLOW), phase("c", 6)])
    assert [links.at(step).name for step in range(1, 8)] == ["a", "a", "a", "a", "b", "c", "c"]
    assert links.at(5).nodes != links.at(6).nodes == links.at(1).nodes


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ([], "phases: the first begins with from_step 1, not none at all"),
        ([phase(from_step=2)], "phases: the first begins with from_step 1, not 2"),
        ([phase("a"), phase("b", 9), phase("c", 9)], r"phases: from_step 9 does not come after .*: \[1, 9, 9\]"),
        ([phase("a"), phase("b", 9), phase("c", 3)], r"phases: from_step 3 does not come after .*: \[1, 9, 3\]"),
        ([phase("a"), phase("a", 9)], "phases: each has a name of its own, not a, a"),
        ([phase(from_step=1.5)], "phase 'first': from_step is a whole number, not 1.5"),
        ([phase(from_step=True)], "phase 'first': from_step is a whole number, not True"),
        ([phase(node={**FAST, "latency_ms": -1})], "phase 'first', node: latency_ms is at least 0, not -1"),
        ([phase(nodes={**FAST, "mb_per_s": 0})], "phase 'first', nodes: mb_per_s is above 0, not 0"),
        ([phase(nodes={**FAST, "mb_per_s": -5})], "phase 'first', nodes: mb_per_s is above 0, not -5"),
        ([phase(node={**FAST, "mb_per_s": float("nan")})], "phase 'first', node: mb_per_s is a number, not nan"),
        ([phase(node={**FAST, "mb_per_s": "fast"})], "phase 'first', node: mb_per_s is a number, not 'fast'"),
        ([phase(node={"latency_ms": 1})], "phase 'first', node has the keys latency_ms, mb_per_s, and no others"),
        ([phase(node=7)], "phase 'first', node has the keys latency_ms, mb_per_s, and no others; it is 7"),
        ([{**phase(), "jitter": 1}], "a phase has the keys name, from_step, node, nodes, and no others"),
        (["equal"], "a phase has the keys name, from_step, node, nodes, and no others; it is 'equal'"),
    ],
)
def test_what_is_no_link_is_refused_in_a_sentence(phases: list[Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        Links.of(phases)
    assert "\n" not in refused.value.message

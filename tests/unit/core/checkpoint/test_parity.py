"""Where parity goes, and what can be had again with it, against a model that tries everything."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from elastic_jobs.job_file.sections import SnapshotSpec
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.checkpoint.parity import Stripe, place_parity
from elastic.core.checkpoint.snapshots import Held, not_whole, recoverable

WIDTHS = (2, 3, 4)


def nodes_of(count: int, ranks_each: int = 1) -> list[str]:
    return [f"n{node}" for node in range(count) for _ in range(ranks_each)]


def stripes_of(placed: tuple[Stripe | None, ...]) -> list[Stripe]:
    return sorted({stripe for stripe in placed if stripe is not None}, key=lambda stripe: stripe.ranks)


def survivors(ranks: list[str], placed: tuple[Stripe | None, ...], lost: set[str]) -> dict[str, list[Held]]:
    """What the nodes that are left hold of one snapshot."""
    held: dict[str, list[Held]] = {node: [] for node in ranks if node not in lost}
    for rank, node in enumerate(ranks):
        if node not in lost:
            held[node].append(Held(1, 5, rank, len(ranks), replica=False))
        stripe = placed[rank]
        if stripe is not None and stripe.holder not in lost:
            members = stripe.ranks if len(stripe.ranks) > 1 else ()
            held[stripe.holder].append(Held(1, 5, rank, len(ranks), replica=True, stripe=members))
    return held


def assert_survives(ranks: list[str], placed: tuple[Stripe | None, ...], lost: set[str]) -> None:
    (found,) = recoverable(survivors(ranks, placed, lost))
    assert (found.step, found.generation) == (5, 1)
    assert not lost.intersection(found.holders)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ranks_each", [1, 2, 5])
def test_any_one_node_may_be_lost(width: int, ranks_each: int) -> None:
    for count in range(2, 25):
        ranks = nodes_of(count, ranks_each)
        placed = place_parity(ranks, width)
        for node in set(ranks):
            assert_survives(ranks, placed, {node})


RAGGED = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=30).map(
    lambda ranks: [f"d{domain}-{node}" for domain, node in ranks]
)


def domains_of(ranks: list[str]) -> dict[str, str]:
    return {node: node.split("-")[0] for node in ranks}


@given(RAGGED, st.sampled_from(WIDTHS), st.booleans())
def test_any_one_node_may_be_lost_wherever_ranks_are(ranks: list[str], width: int, labels: bool) -> None:
    placed = place_parity(ranks, width, domains_of(ranks) if labels else None)
    if len(set(ranks)) == 1:
        assert placed == (None,) * len(ranks)
        return
    for rank, stripe in enumerate(placed):
        assert stripe is not None
        where = [ranks[other] for other in stripe.ranks]
        assert rank in stripe.ranks
        assert len({*where, stripe.holder}) == len(where) + 1 <= width + 1
    for node in set(ranks):
        assert_survives(ranks, placed, {node})


@pytest.mark.parametrize("width", WIDTHS)
def test_a_whole_domain_may_be_lost_where_there_are_more_of_them_than_a_stripe_has_ranks(width: int) -> None:
    tried = 0
    for domain_count in range(width + 1, 9):
        for size in range(1, 5):
            for ranks_each in (1, 3):
                ranks = [f"d{d}-{n}" for d in range(domain_count) for n in range(size) for _ in range(ranks_each)]
                domains = domains_of(ranks)
                placed = place_parity(ranks, width, domains)
                for domain in set(domains.values()):
                    assert_survives(ranks, placed, {node for node in ranks if domains[node] == domain})
                tried += 1
    assert tried


def test_nobody_keeps_more_parity_than_others() -> None:
    for width in WIDTHS:
        for count in range(2, 25):
            for ranks_each in (1, 2, 3, 8):
                ranks = nodes_of(count, ranks_each)
                load = Counter(stripe.holder for stripe in stripes_of(place_parity(ranks, width)))
                counts = [load[node] for node in set(ranks)]
                assert max(counts) - min(counts) <= 1, (width, count, ranks_each, load)


def test_parity_takes_as_little_memory_as_it_can() -> None:
    for width in WIDTHS:
        for count in range(2, 25):
            stripes = stripes_of(place_parity(nodes_of(count), width))
            most = min(width, count - 1)
            assert len(stripes) == -(-count // most)
            sizes = sorted(len(stripe.ranks) for stripe in stripes)
            assert all(after - before <= 1 for before, after in pairwise(sizes))


def test_stripes_of_few_nodes() -> None:
    assert place_parity(["a"], 3) == (None,)
    assert place_parity(["a", "b"], 3) == (Stripe((0,), "b"), Stripe((1,), "a"))
    assert place_parity(["a", "b", "c", "d"], 3) == (
        Stripe((0, 2), "b"), Stripe((1, 3), "c"), Stripe((0, 2), "b"), Stripe((1, 3), "c"),
    )  # fmt: skip


# --- what can be put together ---


def by_trying(held: dict[str, list[Held]], size: int) -> bool:
    """Make whatever can be made until there is nothing new."""
    there = {copy.rank for copies in held.values() for copy in copies if not copy.stripe}
    while True:
        made = {
            copy.rank
            for copies in held.values()
            for copy in copies
            if copy.stripe and set(copy.stripe) - {copy.rank} <= there
        }
        if made <= there:
            return there == set(range(size))
        there |= made


@given(RAGGED, st.sampled_from(WIDTHS), st.data())
def test_whatever_is_lost(ranks: list[str], width: int, data: st.DataObject) -> None:
    """A rank is in one stripe only, so that making a shard never waits for another one that is made."""
    placed = place_parity(ranks, width)
    lost = data.draw(st.sets(st.sampled_from(sorted(set(ranks)))))
    held = survivors(ranks, placed, lost)
    found = recoverable(held)
    assert bool(found) == by_trying(held, len(ranks))
    # A model of the loss itself: of each stripe at most one part.
    gone = Counter(stripe for rank, stripe in enumerate(placed) if ranks[rank] in lost)
    whole = all(
        stripe is not None and count + (stripe.holder in lost) <= 1 if stripe is not None else count == 0
        for stripe, count in gone.items()
    )
    assert bool(found) == whole
    for snapshot in found:
        for rank, node in enumerate(snapshot.holders):
            assert node not in lost
            assert node in (ranks[rank], getattr(placed[rank], "holder", None))


def test_a_shard_that_is_there_is_not_made() -> None:
    own = [Held(1, 5, rank, 3, False) for rank in range(3)]
    parity = [Held(1, 5, rank, 3, True, (0, 1)) for rank in (0, 1)]
    (found,) = recoverable({"a": own[:1], "b": own[1:2], "c": [own[2]], "d": parity})
    assert found.holders == ("a", "b", "c")
    (found,) = recoverable({"b": own[1:2], "c": [own[2]], "d": parity})
    assert found.holders == ("d", "b", "c")
    made = Held(1, 5, 0, 3, True)
    (found,) = recoverable({"c": [own[2]], "d": [*parity, made]})
    assert found.holders == ("d", "d", "c")


def test_parity_of_another_step_is_of_no_use() -> None:
    own = [Held(1, 5, 1, 2, False)]
    for other in (Held(1, 4, 0, 2, True, (0, 1)), Held(2, 5, 0, 2, True, (0, 1)), Held(1, 5, 0, 3, True, (0, 1))):
        assert recoverable({"b": own, "d": [other]}) == ()


def test_what_is_missing_is_said() -> None:
    parity = [Held(1, 5, rank, 3, True, (0, 1)) for rank in (0, 1)]
    older = [Held(1, 4, rank, 3, True) for rank in range(3)]
    assert not_whole({"d": [*parity, Held(1, 5, 2, 3, False)], "e": older}) == (
        "snapshot memory:step-00000005-g0001 is not whole: no node that answers has the shard of ranks 0, 1 or the "
        "parity and all other shards to make it of",
    )
    assert not_whole({"e": older, "f": [Held(1, 3, 0, 3, False)]}) == ()
    assert not_whole({}) == ()


# --- the setting ---


def test_parity_takes_the_place_of_replicas() -> None:
    assert (SnapshotSpec().replicas, SnapshotSpec().parity) == (1, 0)
    assert SnapshotSpec(parity=3).replicas == 0
    assert SnapshotSpec(parity=0, replicas=2).replicas == 2
    with pytest.raises(ValueError, match=r"parity \(3\) takes the place of replicas \(1\): leave one of them out"):
        SnapshotSpec(parity=3, replicas=1)

from __future__ import annotations

import pytest

from elastic.core.errors import IntegrityError, UsageError
from elastic.core.server.placement import (
    Copy,
    Servers,
    View,
    first_view,
    flat_ranges,
    generation_view,
    installed,
    next_view,
    refused,
)


def view(count: int = 3) -> View:
    return first_view({f"s{at}": ("host", at) for at in range(count)})


def test_ranges_are_balanced_and_cover_the_vector() -> None:
    ranges = flat_ranges(10, 3)
    assert ranges == ((0, 3), (3, 6), (6, 10))
    with pytest.raises(UsageError, match="2 parameters cannot be cut into 3 shards"):
        flat_ranges(2, 3)


def test_the_replica_is_on_the_next_server() -> None:
    assert [(at.primary, at.replica) for at in view().shards] == [("s0", "s1"), ("s1", "s2"), ("s2", "s0")]
    with pytest.raises(UsageError, match="needs two nodes"):
        view(1)


def test_what_servers_hold_of_another_generation_is_not_its_state() -> None:
    view = generation_view(7, {f"s{at}": ("host", at) for at in range(2)})
    assert view.shards == (Servers(7, 7, "s0", "s1"), Servers(7, 7, "s1", "s0"))
    assert installed(Copy(6), "s0", view.shards[0]) == Copy()
    assert installed(Copy(7), "s0", view.shards[0]) == Copy(7)
    assert generation_view(8, {"s0": ("host", 0)}).shards == (Servers(8, 8, "s0", None),)


def test_a_replica_takes_over_and_a_shard_that_lost_one_copy_gets_another() -> None:
    after = next_view(view(), ["s1"], {"s3": ("host", 3)})
    assert [(at.primary, at.replica) for at in after.shards] == [("s0", "s3"), ("s2", "s3"), ("s2", "s0")]
    assert [(at.epoch, at.before) for at in after.shards] == [(2, 0), (2, 1), (1, 0)], "the third is not interrupted"
    assert set(after.addresses) == {"s0", "s2", "s3"}


def test_the_last_server_has_the_only_copy() -> None:
    alone = next_view(view(2), ["s0"])
    assert [(at.primary, at.replica) for at in alone.shards] == [("s1", None), ("s1", None)]
    with pytest.raises(IntegrityError, match="both copies of shard 0, on s1 and None, are lost"):
        next_view(alone, ["s1"])
    assert {at.replica for at in next_view(alone, [], {"s2": ("host", 2)}).shards} == {"s2"}


OWN = Servers(epoch=4, before=3, primary="p", replica="r")


def test_only_a_copy_that_was_in_step_is_continued_from() -> None:
    assert [installed(Copy(epoch), "p", OWN) for epoch in (2, 3, 4)] == [Copy(), Copy(4), Copy(4)]
    assert [installed(Copy(epoch), "r", OWN) for epoch in (3, 4)] == [Copy(), Copy(4)]
    assert installed(Copy(4), "other", OWN) == Copy() == installed(Copy(), "p", OWN)


def test_a_primary_that_missed_a_view_is_still_in_step() -> None:
    """Only the replica changed, twice: its own state is the newest there is."""
    first = view()
    third = next_view(next_view(first, ["s1"], {"s3": ("host", 3)}), ["s3"])
    assert installed(Copy(first.shards[0].epoch), "s0", third.shards[0]) == Copy(3)


def test_requests_of_another_epoch_or_to_another_role_are_refused() -> None:
    assert refused(Copy(4), "p", OWN, 4, "primary") is None is refused(Copy(4), "r", OWN, 4, "replica")
    assert "epoch 3" in str(refused(Copy(4), "p", OWN, 3, "primary"))
    assert "not the replica" in str(refused(Copy(4), "p", OWN, 4, "replica"))
    assert "not here" in str(refused(Copy(), "p", OWN, 4, "primary"))

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from elastic.core.server.continuing import HeldCopy, Saved, Whole, goes_on_from, scales_of, wholes


def copy(shard: int, first: int, last: int, closed: tuple[int, ...] = (), epoch: int = 3) -> HeldCopy:
    return HeldCopy(epoch, shard, 2, 2, first, last, closed)


def test_the_newest_version_that_every_shard_gives_and_every_rank_has_closed() -> None:
    held = {"a": [copy(0, 6, 8, (6, 7)), copy(1, 5, 6)], "b": [copy(1, 5, 7)]}
    assert newest_whole(held) == Whole(3, 7, 2, ("a", "b"), ({}, {}))
    assert newest_whole({"a": held["a"]}) == Whole(3, 6, 2, ("a", "a"), ({}, {}))
    assert newest_whole({"a": [copy(0, 6, 8, (6, 7))], "b": []}) is None, "a shard is gone"
    assert newest_whole({"a": [copy(0, 6, 8), copy(1, 5, 9)]}) is None, "nobody knows what the steps were"
    assert newest_whole({}) is None


def test_a_generation_that_has_not_begun_everywhere_leaves_the_state_of_the_one_before() -> None:
    left = {"a": [copy(0, 6, 8, (7,)), copy(1, 6, 8)]}
    assert newest_whole({**left, "b": [copy(0, 7, 7, epoch=4)]}) == newest_whole(left)
    begun = {**left, "b": [copy(0, 7, 7, (7,), epoch=4), copy(1, 7, 7, epoch=4)]}
    assert [whole.epoch for whole in wholes(begun)] == [4, 3]


def test_only_what_followed_the_state_that_was_saved() -> None:
    whole = Whole(3, 9, 2, ())
    origin = Saved(5, 1)
    assert goes_on_from(whole, origin, Saved(5, 1)), "the checkpoint that its generation was restored from"
    assert goes_on_from(whole, origin, Saved(8, 3)), "one of its own"
    assert not goes_on_from(whole, origin, Saved(4, 1)), "an older one, since that was refused"
    assert not goes_on_from(whole, origin, Saved(5, 2)), "the same step of another history"
    assert not goes_on_from(whole, origin, Saved(8, 2)), "another history"
    assert not goes_on_from(whole, origin, Saved(9, 3)), "nothing is newer"
    assert goes_on_from(whole, Saved(), Saved())


def test_a_gradient_is_clipped_by_the_norm_of_all_shards() -> None:
    squares = [{4: 9.0, 5: 0.01, 6: 1.0}, {4: 16.0, 5: 0.0}]
    assert scales_of(squares, 0.0) == {}
    assert scales_of(squares, 1.0) == {4: pytest.approx(1 / 5, rel=1e-6), 5: 1.0}, "of update 6 one shard knows nothing"


def newest_whole(held: Mapping[str, Sequence[HeldCopy]]) -> Whole | None:
    return next(wholes(held), None)


@dataclass
class Shard:
    """One copy: the gradients (step, rank) that it has, and the updates made."""

    ranks: int
    version: int = 0
    first: int = 0
    gradients: set[tuple[int, int]] = field(default_factory=set)
    closed: dict[int, set[int]] = field(default_factory=dict)

    def advance(self, version: int) -> None:
        while self.version < version:
            assert all((self.version, rank) in self.gradients for rank in range(self.ranks)), (
                "an update lacks gradients"
            )
            self.first, self.version = self.version, self.version + 1

    def held(self, shard: int, shards: int) -> HeldCopy:
        last = self.version
        while all((last, rank) in self.gradients for rank in range(self.ranks)):
            last += 1
        closed = tuple(step for step, ranks in self.closed.items() if len(ranks) == self.ranks)
        return HeldCopy(1, shard, shards, self.ranks, self.first, last, closed)


class Run:
    """Ranks take turns at random; each thing is done to a replica before it is done to the primary."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ranks, self.shards, self.staleness = (self.chance.randint(1, 3) for _ in range(3))
        self.copies = [(Shard(self.ranks), Shard(self.ranks)) for _ in range(self.shards)]
        self.said = [[0] * self.ranks for _ in range(self.shards)]
        self.taken = 0

    def rank(self, rank: int) -> Iterator[None]:
        for step in range(1000):
            for shard in range(self.shards):
                for at in (1, 0):
                    self.copies[shard][at].gradients.add((step, rank))
                    yield
            for shard in range(self.shards):
                self.said[shard][rank] = step + 1
                while min(self.said[shard]) < step + 1 - self.staleness:
                    yield
                version = min(self.said[shard])
                for at in (1, 0):
                    self.copies[shard][at].advance(version)
                    yield
                self.taken = max(self.taken, version)
            for at in (1, 0):
                self.copies[0][at].closed.setdefault(step + 1, set()).add(rank)
                yield


@pytest.mark.parametrize("seed", range(200))
def test_whenever_and_whichever_copies_are_lost_at_most_the_newest_update_is_made_again(seed: int) -> None:
    run = Run(seed)
    ranks = [run.rank(rank) for rank in range(run.ranks)]
    for _ in range(run.chance.randint(0, 400)):
        next(run.chance.choice(ranks))
    left = {f"s{shard}": [run.chance.choice(copies).held(shard, run.shards)] for shard, copies in enumerate(run.copies)}
    whole = newest_whole(left)
    if run.taken > 1:
        assert whole is not None
        assert whole.version >= run.taken - 1
    for name in () if whole is None else whole.holders:
        assert whole is not None
        assert left[name][0].first <= whole.version <= left[name][0].last

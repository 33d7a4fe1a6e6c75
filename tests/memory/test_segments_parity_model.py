"""Nodes with parity against a model: shares come in pieces, in any order, break off and continue; any node may go."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

import memory_samples as samples
import numpy as np
import pytest
import xxhash

from elastic.checkpoint.memory.server import parity as parity_module
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.server.parity import Contribution, Parity
from elastic.checkpoint.memory.server.parity_blocks import chunk_hash
from elastic.checkpoint.memory.server.segment_pool import SegmentPool
from elastic.checkpoint.memory.shard_buffers import ShardKey, SnapshotRef
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.parity import Stripe, place_parity
from elastic.core.checkpoint.snapshots import Held, recoverable
from elastic.core.errors import IntegrityError, StorageError

LIMIT_BYTES = 1 << 20


class Node:
    def __init__(self, cluster: Cluster) -> None:
        self.pool = SegmentPool(LIMIT_BYTES)
        self.shards = NodeShards(self.pool)
        self.parity = Parity(self.pool, cluster.read)


@dataclass
class Rank:
    """A sender: what its worker has committed, and how far the holder has been told of it."""

    node: int
    template: ShardRecord
    stripe: Stripe
    key: ShardKey | None = None  # at the holder
    step: int = 0
    writing: tuple[int, int] | None = None  # step, number of the copy
    sending: AbstractContextManager[Contribution | None] | None = None
    share: Contribution | None = None
    at: int = 0
    complete: int = 0


class Cluster:
    """Nodes with one or two ranks each."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.nodes = {at: Node(self) for at in range(self.chance.randrange(3, 7))}
        self.width = self.chance.randrange(2, 5)
        self.generation, self.losses, self.made = 0, 0, 0
        self.settled: SnapshotRef | None = None
        self.ranks: list[Rank] = []
        self.templates: dict[tuple[int, int], ShardRecord] = {}
        self.next_node = len(self.nodes)
        self.begin_generation(None)

    def close(self) -> None:
        self.stop_sending()
        for node in self.nodes.values():
            node.pool.close(0)

    def begin_generation(self, base: SnapshotRef | None) -> None:
        self.generation += 1
        each = self.chance.randrange(1, 3)
        names = [str(at) for at in self.nodes for _ in range(each)]
        self.ranks = []
        for number, (name, stripe) in enumerate(zip(names, place_parity(names, self.width), strict=True)):
            assert stripe is not None
            template = samples.template(number, len(names), self.generation, self.chance.randrange(1, 9))
            self.templates[self.generation, number] = template
            self.ranks.append(Rank(int(name), template, stripe))
        on_change = base if self.chance.random() < 0.7 else None
        for number in self.chance.sample(range(len(names)), len(names)):
            rank = self.ranks[number]
            self.nodes[rank.node].shards.open(own(rank.template), rank.template, on_change)
            holder = self.nodes[int(rank.stripe.holder)]
            if len(rank.stripe.ranks) > 1:
                rank.key = holder.parity.open(rank.stripe.ranks, rank.template, on_change)
            else:
                rank.key = ShardKey(self.generation, number, replica=True)
                holder.shards.open(rank.key, rank.template, on_change)

    def act(self) -> None:
        rank = self.chance.choice(self.ranks)
        match self.chance.randrange(8):
            case 0 | 1 if rank.writing is None and rank.complete == rank.step:
                self.write(rank)
            case 2 | 3 | 4 | 5 if rank.complete < rank.step:
                self.send(rank)
            case 6 if self.settled is not None and self.settled[0] == self.generation:
                self.nodes[rank.node].pool.settle(self.settled)
            case 7 if self.chance.random() < 0.1:
                self.lose_a_node()
        step = min(rank.complete for rank in self.ranks)
        if step > 0:
            self.settled = (self.generation, step)

    def write(self, rank: Rank) -> None:
        """The worker copies its state and commits it, unless it has not heard that its last one counts."""
        shards, key = self.nodes[rank.node].shards, own(rank.template)
        try:
            with shards.writing(key) as (number, segment), segment.map() as view:
                view[:] = memoryview(samples.content(rank.template, rank.step + 1))
        except IntegrityError:
            return
        rank.step += 1
        shards.commit(key, number, rank.step, {"of": rank.step})

    def send(self, rank: Rank) -> None:
        """A piece of the share, or a break of the connection, or the end."""
        assert rank.key is not None
        shards, holder = self.nodes[rank.node].shards, self.nodes[int(rank.stripe.holder)]
        data = memoryview(samples.content(rank.template, rank.step))
        if not rank.key.stripe:
            holder.pool.settle(shards.settled)
            with holder.shards.receiving(rank.key) as receiving:
                receiving.view[:] = data
                holder.shards.finish(receiving, rank.step, {"of": rank.step}, "")
            rank.complete = rank.step
        elif rank.sending is None:
            holder.pool.settle(shards.settled)
            sending = holder.parity.contributing(rank.key, rank.template.rank, rank.step, {"of": rank.step})
            rank.sending, rank.share = sending, sending.__enter__()
            assert rank.share is not None
            rank.at = rank.share.begin
        elif self.chance.random() < 0.1:
            self.stop(rank)
        elif rank.share is not None and rank.at < len(data):
            piece = data[rank.at : rank.at + self.chance.randrange(1, 40)]
            rank.share.add(piece, chunk_hash(piece))
            rank.at += len(piece)
        else:
            assert rank.share is not None
            rank.share.end(xxhash.xxh3_64(data).hexdigest())
            rank.sending.__exit__(None, None, None)
            rank.sending, rank.complete = None, rank.step

    def stop(self, rank: Rank) -> None:
        if rank.sending is not None:
            with suppress(ConnectionError):
                rank.sending.__exit__(ConnectionError, ConnectionError("it broke"), None)
            rank.sending = None

    def stop_sending(self) -> None:
        for rank in self.ranks:
            self.stop(rank)

    def read(self, source: tuple[str, int], held: Held, length: int) -> Iterator[memoryview]:
        shards = self.nodes[source[1]].shards
        with shards.reading(held.generation, held.step, held.rank) as reading, reading.segment.map() as view:
            for at in range(0, length, 16):
                with view[at : min(at + 16, length)] as piece:
                    yield piece

    def held(self, without: int | None = None) -> dict[str, tuple[Held, ...]]:
        return {str(at): node.pool.held() for at, node in self.nodes.items() if at != without}

    def check(self) -> None:
        """Whichever node goes now: what has settled is there, or newer."""
        if self.settled is not None and self.settled[0] == self.generation:
            for lost in self.nodes:
                best = recoverable(self.held(without=lost))
                assert best, f"without node {lost} nothing is left"
                assert (best[0].generation, best[0].step) >= self.settled, f"without node {lost}: {best} {self.settled}"

    def lose_a_node(self) -> None:
        """Everything that can be put together is what was written, shards that are made of parity too."""
        self.stop_sending()
        lost = self.chance.choice(list(self.nodes))
        self.nodes.pop(lost).pool.close(0)
        self.losses += 1
        found = recoverable(self.held())
        for snapshot in found:
            for number, node in enumerate(snapshot.holders):
                self.look(snapshot.generation, snapshot.step, number, int(node), snapshot.holders)
        base = (found[0].generation, found[0].step) if found else None
        if self.settled is not None and self.settled[0] == self.generation:
            assert base is not None, f"nothing of {self.settled} is left without node {lost}"
            assert base >= self.settled, f"{self.settled} was lost with node {lost}"
        if len(self.nodes) < 3 or self.chance.random() < 0.5:
            self.nodes[self.next_node] = Node(self)
            self.next_node += 1
        self.settled = base
        self.begin_generation(base)

    def look(self, generation: int, step: int, number: int, at: int, holders: tuple[str, ...]) -> None:
        node = self.nodes[at]
        held = min(
            (h for h in node.pool.held() if (h.generation, h.step, h.rank) == (generation, step, number)),
            key=lambda h: (bool(h.stripe), h.replica),
        )
        if held.stripe:
            self.made += 1
            assert node.parity.rebuild(held, {o: ("", int(holders[o])) for o in held.others}) == replace(
                held, stripe=()
            )
        template = self.templates[generation, number]
        with node.shards.reading(generation, step, number) as reading, reading.segment.map() as view:
            assert np.array_equal(np.frombuffer(view, np.uint8), samples.content(template, step))
            assert reading.content.extra_state == {"of": step}
        record = node.shards.record(replace(held, stripe=()), digests=True)
        assert record.digests == samples.full_record(template, step).digests


def own(template: ShardRecord) -> ShardKey:
    return ShardKey(template.generation, template.rank, replica=False)


def test_any_one_node_may_be_lost_at_any_moment() -> None:
    losses = made = 0
    for seed in range(200):
        cluster = Cluster(seed)
        try:
            for number in range(300):
                try:
                    cluster.act()
                    cluster.check()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, action {number}: {error!r}") from error
        finally:
            cluster.close()
        losses, made = losses + cluster.losses, made + cluster.made
    assert losses > 300
    assert made > 150


# --- one holder, step by step ---


class Holder:
    """Keeps the parity of ranks 0 and 1; what it reads from others is what `during` leaves of them."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.during = during
        self.pool = SegmentPool(LIMIT_BYTES)
        self.parity = Parity(self.pool, self.read)
        self.records = [samples.template(rank, 2) for rank in range(2)]
        (self.key,) = {self.parity.open((0, 1), record) for record in self.records}

    def share(self, rank: int, step: int) -> AbstractContextManager[Contribution | None]:
        return self.parity.contributing(self.key, rank, step, None)

    def take(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            with self.share(rank, step) as share:
                assert share is not None
                data = self.data(rank, step)
                share.add(data, chunk_hash(data))
                share.end(xxhash.xxh3_64(data).hexdigest())

    def data(self, rank: int, step: int) -> memoryview:
        return memoryview(samples.content(self.records[rank], step))

    def read(self, source: tuple[str, int], held: Held, length: int) -> Iterator[memoryview]:
        self.during()
        yield self.data(held.rank, held.step)[:length]


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.pool.close(0)


def test_a_connection_that_was_replaced_adds_nothing_more(holder: Holder) -> None:
    data = holder.data(0, 1)
    first, second = data[:100], data[100:]
    with suppress(ConnectionError), holder.share(0, 1) as old:
        assert old is not None
        old.add(first, chunk_hash(first))
        with holder.share(0, 1) as new:
            assert new is not None
            assert new.begin == 100
            with pytest.raises(ConnectionError, match="this connection was replaced"):
                old.add(second, chunk_hash(second))
            with pytest.raises(ConnectionError, match="this connection was replaced"):
                old.end("")
            new.add(second, chunk_hash(second))
            new.end(xxhash.xxh3_64(data).hexdigest())
        with holder.share(0, 1) as late:
            assert late is not None
            assert late.done
            with pytest.raises(ConnectionError, match="more bytes arrived than"):
                late.add(first, chunk_hash(first))
    holder.take(1, (1,))
    made = holder.parity.rebuild(Held(1, 1, 0, 2, True, (0, 1)), {1: ("", 1)})
    assert (
        NodeShards(holder.pool).record(made, digests=True).digests == samples.full_record(holder.records[0], 1).digests
    )


def test_a_newer_step_takes_the_place_of_one_that_never_became_whole(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_module, "_MEMBERS_LIMIT_S", 0.01)
    data = holder.data(0, 1)
    with holder.share(0, 1) as old:
        assert old is not None
        with pytest.raises(StorageError, match="parity of step 2 cannot start: its memory is in use"):
            holder.share(1, 2).__enter__()
        with pytest.raises(ConnectionError, match="was cancelled"):
            old.add(data, chunk_hash(data))
    holder.take(2)
    with pytest.raises(IntegrityError, match="not a new snapshot"):
        holder.take(1)
    assert {item.step for item in holder.pool.held()} == {2}


def test_an_older_step_is_not_begun_beside_a_newer_one(holder: Holder) -> None:
    with holder.share(0, 2), pytest.raises(IntegrityError, match="of step 2 is being assembled here, and step 1"):
        holder.share(1, 1).__enter__()


def test_parity_that_is_given_up_while_it_is_used_makes_nothing(holder: Holder) -> None:
    holder.take(1)
    newer = samples.template(0, 1, 2)
    holder.during = lambda: NodeShards(holder.pool).open(ShardKey(2, 0, False), newer, base=(1, 0))
    with pytest.raises(IntegrityError, match="was dropped while it was used"):
        holder.parity.rebuild(Held(1, 1, 0, 2, True, (0, 1)), {1: ("", 1)})
    assert holder.pool.held() == ()
    assert holder.pool.stats()["segments"] == 0


def test_a_holder_without_the_memory_for_one_more_shard_says_so(holder: Holder) -> None:
    holder.take(1)
    holder.pool.limit_bytes = holder.records[0].bytes
    with pytest.raises(StorageError, match=r"of which 0\.00 GiB are available.*rank 0, step 1"):
        holder.parity.rebuild(Held(1, 1, 0, 2, True, (0, 1)), {1: ("", 1)})
    assert holder.pool.stats()["segments"] == 1

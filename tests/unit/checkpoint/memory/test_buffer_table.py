"""The books against a model: whatever happens in whatever order, what counts is there and what is said is true."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from elastic.checkpoint.memory.server.buffer_table import BufferTable
from elastic.checkpoint.memory.shard_buffers import ShardBuffer, ShardKey, ShardShape, SnapshotRef
from elastic.core.checkpoint.snapshots import Held, place_replicas, recoverable
from elastic.core.errors import Fenced, IntegrityError


@dataclass
class Node:
    """The table, and the memory that it describes: what was really written into each buffer."""

    table: BufferTable = field(default_factory=BufferTable)
    memory: dict[int, tuple[ShardKey, int] | None] = field(default_factory=dict)
    readers: list[tuple[ShardBuffer, tuple[ShardKey, int]]] = field(default_factory=list)
    numbers: int = 0

    def open(self, key: ShardKey, world_size: int, base: SnapshotRef | None) -> None:
        self.table.open(key, ShardShape(world_size, 10), base)
        self.check()

    def begin(self, key: ShardKey) -> ShardBuffer | None:
        buffer = self.table.next_buffer(key)
        if buffer is None:
            self.numbers += 1
            buffer = self.table.add(key, self.numbers)
        if buffer.users:
            return None
        self.table.begin(buffer)
        self.memory[buffer.id] = None
        self.check()
        return buffer

    def complete(self, buffer: ShardBuffer, step: int) -> None:
        # The bytes are there before the books say so.
        self.memory[buffer.id] = (buffer.key, step)
        self.table.complete(buffer, step)
        self.check()

    def settle(self, settled: SnapshotRef) -> None:
        self.table.settle(settled)
        self.check()

    def read(self, held: Held) -> None:
        buffer = self.table.find(held.generation, held.step, held.rank, held.replica)
        assert buffer is not None
        buffer.users += 1
        content = self.memory[buffer.id]
        assert content is not None
        self.readers.append((buffer, content))

    def release(self) -> None:
        buffer, _ = self.readers.pop()
        buffer.users -= 1
        self.check()

    def check(self) -> None:
        for number in self.table.collect():
            del self.memory[number]
        by_line: dict[ShardKey, list[ShardBuffer]] = {}
        for buffer in self.table.buffers.values():
            if not buffer.dropped:
                by_line.setdefault(buffer.key, []).append(buffer)
        for buffers in by_line.values():
            assert len(buffers) <= 2, "more than two copies of one rank"
            assert sum(buffer.step is None for buffer in buffers) <= 1, "two incomplete copies of one rank"
        for held in self.table.held():
            buffer = self.table.find(held.generation, held.step, held.rank, held.replica)
            assert buffer is not None
            assert self.memory[buffer.id] == (ShardKey(held.generation, held.rank, held.replica), held.step)
        for buffer, content in self.readers:
            assert self.memory[buffer.id] == content, "memory changed under a reader"


def one_history(seed: int) -> None:
    """One node that is told anything, in any order, by anybody."""
    chance = random.Random(seed)
    node = Node()
    generation, step = 1, 0
    base: SnapshotRef | None = None
    writing: list[ShardBuffer] = []
    settled: set[Held] = set()
    for _ in range(40):
        key = ShardKey(generation, chance.randrange(2), chance.random() < 0.4)
        match chance.randrange(8):
            case 0 if chance.random() < 0.3:
                generation += 1
                writing.clear()
                # All that begin a generation begin it from one snapshot.
                base = chance.choice([None, *{(i.generation, i.step) for i in sorted(node.table.held())}])
            case 1:
                if base is not None and node.table.settled[0] < generation:
                    settled = {i for i in node.table.held() if (i.generation, i.step) == base}
                node.open(key, 2, base)
            case 2 | 3 if key in node.table.shards:
                try:
                    buffer = node.begin(key)
                except IntegrityError:
                    buffer = None  # its last snapshot may count already
                if buffer is not None:
                    writing = [other for other in writing if other is not buffer] + [buffer]
            case 4 | 5 if writing:
                step += 1
                node.complete(writing.pop(chance.randrange(len(writing))), step)
            case 6 if node.table.held():
                item = chance.choice(node.table.held())
                ref = (item.generation, item.step)
                if ref > node.table.settled and ref[0] == node.table.newest:
                    settled = {i for i in node.table.held() if (i.generation, i.step) == ref}
                node.settle(ref)
            case 7 if node.table.held() or node.readers:
                if node.readers and chance.random() < 0.6:
                    node.release()
                elif node.table.held():
                    node.read(chance.choice(node.table.held()))
        assert settled <= set(node.table.held()), "a snapshot that had settled was lost"
    while node.readers:
        node.release()
    assert len(node.memory) == len(node.table.buffers)


@pytest.mark.parametrize("seeds", [range(3_000), pytest.param(range(3_000, 10_000), marks=pytest.mark.slow)])
def test_ten_thousand_histories_of_one_node(seeds: range) -> None:
    for seed in seeds:
        try:
            one_history(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@dataclass
class Rank:
    node: int
    holders: tuple[int, ...]
    step: int = 0
    buffer: ShardBuffer | None = None
    waiting: dict[int, ShardBuffer | None] = field(
        default_factory=dict
    )  # holders that have not got the last snapshot yet
    heard: SnapshotRef = (-1, -1)


class Cluster:
    """Nodes with one rank each, replicas on the next ones; messages come late and in any order, pushes break off."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.nodes = {at: Node() for at in range(self.chance.randrange(2, 5))}
        self.replicas = self.chance.randrange(1, 3)
        self.generation, self.step = 0, 0
        self.settled: SnapshotRef | None = None
        self.next_node = len(self.nodes)
        self.begin_generation(None)

    def begin_generation(self, base: SnapshotRef | None) -> None:
        self.generation += 1
        names = [str(at) for at in self.nodes]
        placed = place_replicas(names, min(self.replicas, len(names) - 1))
        self.ranks = [Rank(int(name), tuple(map(int, to))) for name, to in zip(names, placed, strict=True)]
        # Some restore more quickly than others, and whether the base is told makes no difference to safety.
        on_change = base if self.chance.random() < 0.7 else None
        for number in self.chance.sample(range(len(self.ranks)), len(self.ranks)):
            rank = self.ranks[number]
            self.nodes[rank.node].open(ShardKey(self.generation, number, False), len(self.ranks), on_change)
            for holder in rank.holders:
                self.nodes[holder].open(ShardKey(self.generation, number, True), len(self.ranks), on_change)

    def act(self) -> None:
        number = self.chance.randrange(len(self.ranks))
        rank = self.ranks[number]
        node = self.nodes[rank.node]
        match self.chance.randrange(6):
            case 0 if rank.buffer is None and not rank.waiting:
                try:
                    rank.buffer = node.begin(ShardKey(self.generation, number, False))
                except IntegrityError:
                    return  # it has not heard yet that its last snapshot settled
            case 1 if rank.buffer is not None:
                rank.step += 1
                node.complete(rank.buffer, rank.step)
                rank.buffer, rank.waiting = None, dict.fromkeys(rank.holders)
            case 2 | 3 if rank.waiting:
                self.push(rank, number)
            case 4 if self.settled is not None and self.settled[0] == self.generation:
                node.settle(self.settled)
            case 5 if self.chance.random() < 0.15:
                self.lose_a_node()
        self.look()

    def push(self, rank: Rank, number: int) -> None:
        holder = self.chance.choice(list(rank.waiting))
        node, buffer = self.nodes[holder], rank.waiting[holder]
        if buffer is None or self.chance.random() < 0.2:  # begins, or breaks off and begins again
            node.settle(self.nodes[rank.node].table.settled)
            rank.waiting[holder] = node.begin(ShardKey(self.generation, number, True))
        else:
            node.complete(buffer, rank.step)
            del rank.waiting[holder]

    def look(self) -> None:
        """What the controller sees: a step of which every rank has said that all copies are complete."""
        complete = {rank.step if not rank.waiting else rank.step - 1 for rank in self.ranks}
        step = min(complete)
        if step > 0 and (self.settled is None or (self.generation, step) > self.settled):
            self.settled = (self.generation, step)

    def best(self, without: int | None = None) -> SnapshotRef | None:
        found = recoverable({str(at): node.table.held() for at, node in self.nodes.items() if at != without})
        return (found[0].generation, found[0].step) if found else None

    def lose_a_node(self) -> None:
        del self.nodes[self.chance.choice(list(self.nodes))]
        base = self.best()
        if len(self.nodes) < 2 or self.chance.random() < 0.5:
            self.nodes[self.next_node] = Node()
            self.next_node += 1
        if base is None:
            self.settled = None
        self.begin_generation(base)

    def check(self) -> None:
        if self.settled is not None and self.settled[0] == self.generation:
            for lost in self.nodes:
                best = self.best(without=lost)
                assert best is not None, f"without node {lost} nothing is left"
                assert best >= self.settled, f"without node {lost}, {best} is left of {self.settled}"


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 800), marks=pytest.mark.slow)])
def test_any_one_node_may_be_lost_at_any_moment(seeds: range) -> None:
    recovered = 0
    for seed in seeds:
        cluster = Cluster(seed)
        for number in range(250):
            cluster.act()
            try:
                cluster.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, action {number}: {error}") from error
        recovered += cluster.generation > 1 and cluster.settled is not None
    assert recovered > len(seeds) // 4


def opened(key: ShardKey) -> Node:
    node = Node()
    node.table.open(key, ShardShape(1, 10), None)
    return node


OWN = ShardKey(1, 0, False)


def write(node: Node, key: ShardKey, step: int) -> ShardBuffer:
    buffer = node.begin(key)
    assert buffer is not None
    node.complete(buffer, step)
    return buffer


def test_an_own_snapshot_that_may_count_is_not_overwritten() -> None:
    node = opened(OWN)
    write(node, OWN, 1)
    with pytest.raises(IntegrityError, match="step 1 is not yet known to be complete on all ranks"):
        node.begin(OWN)
    node.settle((1, 1))
    write(node, OWN, 2)
    node.settle((1, 2))
    assert {item.step for item in node.table.held()} == {1, 2}


def test_what_is_not_open_or_over_is_not_written() -> None:
    node = opened(OWN)
    with pytest.raises(IntegrityError, match="before it was opened"):
        node.begin(ShardKey(1, 1, False))
    buffer = node.begin(OWN)
    assert buffer is not None
    node.open(ShardKey(2, 0, False), 1, None)
    with pytest.raises(Fenced):
        node.begin(OWN)
    with pytest.raises(Fenced):
        node.table.complete(buffer, 1)
    with pytest.raises(Fenced):
        node.open(ShardKey(1, 1, False), 2, None)


def test_a_line_has_one_size() -> None:
    node = opened(OWN)
    node.table.open(OWN, ShardShape(1, 10), None)
    with pytest.raises(IntegrityError, match="another size"):
        node.table.open(OWN, ShardShape(1, 11), None)


def test_steps_only_grow() -> None:
    node = opened(OWN)
    write(node, OWN, 5)
    node.settle((1, 5))
    buffer = node.begin(OWN)
    assert buffer is not None
    with pytest.raises(IntegrityError, match="not a new snapshot"):
        node.table.complete(buffer, 5)


def test_a_run_that_went_back_keeps_where_it_began() -> None:
    node = opened(OWN)
    write(node, OWN, 1)
    node.settle((1, 1))
    write(node, OWN, 2)
    node.settle((1, 2))
    node.open(ShardKey(2, 0, False), 1, (1, 1))
    assert {item.step for item in node.table.held()} == {1}
    write(node, ShardKey(2, 0, False), 2)
    assert {(item.generation, item.step) for item in node.table.held()} == {(1, 1), (2, 2)}


def test_generations_that_fail_one_after_the_other_do_not_pile_up() -> None:
    node = opened(OWN)
    write(node, OWN, 1)
    node.settle((1, 1))
    for generation in range(2, 50):
        key = ShardKey(generation, 0, False)
        node.open(key, 1, None)
        write(node, key, generation)
        assert (1, 1) in {(item.generation, item.step) for item in node.table.held()}
        assert len(node.table.buffers) <= 4
        assert len(node.table.shards) <= 4

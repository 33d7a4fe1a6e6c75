"""The books against a model: whatever happens in whatever order, what counts is there and what is said is true."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from elastic.checkpoint.memory.server.buffer_table import Books
from elastic.checkpoint.memory.shard_buffers import Copy, Line, Mark, Shape
from elastic.core.checkpoint.snapshots import Held, place_replicas, recoverable
from elastic.core.errors import Fenced, IntegrityError


@dataclass
class Node:
    """Books, and the memory that they are about: what was really written into each copy."""

    books: Books = field(default_factory=Books)
    memory: dict[int, tuple[Line, int] | None] = field(default_factory=dict)
    readers: list[tuple[Copy, tuple[Line, int]]] = field(default_factory=list)
    numbers: int = 0

    def open(self, line: Line, world_size: int, base: Mark | None) -> None:
        self.books.open(line, Shape(world_size, 10), base)
        self.check()

    def begin(self, line: Line) -> Copy | None:
        copy = self.books.choose(line)
        if copy is None:
            self.numbers += 1
            copy = self.books.add(line, self.numbers)
        if copy.users:
            return None
        self.books.begin(copy)
        self.memory[copy.id] = None
        self.check()
        return copy

    def complete(self, copy: Copy, step: int) -> None:
        # The bytes are there before the books say so.
        self.memory[copy.id] = (copy.line, step)
        self.books.complete(copy, step)
        self.check()

    def settle(self, mark: Mark) -> None:
        self.books.settle(mark)
        self.check()

    def read(self, held: Held) -> None:
        copy = self.books.find(held.generation, held.step, held.rank, held.replica)
        assert copy is not None
        copy.users += 1
        content = self.memory[copy.id]
        assert content is not None
        self.readers.append((copy, content))

    def let_go(self) -> None:
        copy, _ = self.readers.pop()
        copy.users -= 1
        self.check()

    def check(self) -> None:
        for number in self.books.sweep():
            del self.memory[number]
        by_line: dict[Line, list[Copy]] = {}
        for copy in self.books.copies.values():
            if not copy.dropped:
                by_line.setdefault(copy.line, []).append(copy)
        for copies in by_line.values():
            assert len(copies) <= 2, "more than two copies of one rank"
            assert sum(copy.step is None for copy in copies) <= 1, "two incomplete copies of one rank"
        for held in self.books.held():
            copy = self.books.find(held.generation, held.step, held.rank, held.replica)
            assert copy is not None
            assert self.memory[copy.id] == (Line(held.generation, held.rank, held.replica), held.step)
        for copy, content in self.readers:
            assert self.memory[copy.id] == content, "memory changed under a reader"


def one_history(seed: int) -> None:
    """One node that is told anything, in any order, by anybody."""
    chance = random.Random(seed)
    node = Node()
    generation, step = 1, 0
    base: Mark | None = None
    writing: list[Copy] = []
    settled: set[Held] = set()
    for _ in range(40):
        line = Line(generation, chance.randrange(2), chance.random() < 0.4)
        match chance.randrange(8):
            case 0 if chance.random() < 0.3:
                generation += 1
                writing.clear()
                # All that begin a generation begin it from one snapshot.
                base = chance.choice([None, *{(i.generation, i.step) for i in sorted(node.books.held())}])
            case 1:
                if base is not None and node.books.mark[0] < generation:
                    settled = {i for i in node.books.held() if (i.generation, i.step) == base}
                node.open(line, 2, base)
            case 2 | 3 if line in node.books.lines:
                try:
                    copy = node.begin(line)
                except IntegrityError:
                    copy = None  # its last snapshot may count already
                if copy is not None:
                    writing = [other for other in writing if other is not copy] + [copy]
            case 4 | 5 if writing:
                step += 1
                node.complete(writing.pop(chance.randrange(len(writing))), step)
            case 6 if node.books.held():
                item = chance.choice(node.books.held())
                mark = (item.generation, item.step)
                if mark > node.books.mark and mark[0] == node.books.newest:
                    settled = {i for i in node.books.held() if (i.generation, i.step) == mark}
                node.settle(mark)
            case 7 if node.books.held() or node.readers:
                if node.readers and chance.random() < 0.6:
                    node.let_go()
                elif node.books.held():
                    node.read(chance.choice(node.books.held()))
        assert settled <= set(node.books.held()), "a snapshot that had settled was lost"
    while node.readers:
        node.let_go()
    assert len(node.memory) == len(node.books.copies)


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
    copy: Copy | None = None
    waiting: dict[int, Copy | None] = field(default_factory=dict)  # holders that have not got the last snapshot yet
    heard: Mark = (-1, -1)


class Cluster:
    """Nodes with one rank each, replicas on the next ones; messages come late and in any order, pushes break off."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.nodes = {at: Node() for at in range(self.chance.randrange(2, 5))}
        self.replicas = self.chance.randrange(1, 3)
        self.generation, self.step = 0, 0
        self.settled: Mark | None = None
        self.next_node = len(self.nodes)
        self.begin_generation(None)

    def begin_generation(self, base: Mark | None) -> None:
        self.generation += 1
        names = [str(at) for at in self.nodes]
        placed = place_replicas(names, min(self.replicas, len(names) - 1))
        self.ranks = [Rank(int(name), tuple(map(int, to))) for name, to in zip(names, placed, strict=True)]
        # Some restore more quickly than others, and whether the base is told makes no difference to safety.
        told = base if self.chance.random() < 0.7 else None
        for number in self.chance.sample(range(len(self.ranks)), len(self.ranks)):
            rank = self.ranks[number]
            self.nodes[rank.node].open(Line(self.generation, number, False), len(self.ranks), told)
            for holder in rank.holders:
                self.nodes[holder].open(Line(self.generation, number, True), len(self.ranks), told)

    def act(self) -> None:
        number = self.chance.randrange(len(self.ranks))
        rank = self.ranks[number]
        node = self.nodes[rank.node]
        match self.chance.randrange(6):
            case 0 if rank.copy is None and not rank.waiting:
                try:
                    rank.copy = node.begin(Line(self.generation, number, False))
                except IntegrityError:
                    return  # it has not heard yet that its last snapshot settled
            case 1 if rank.copy is not None:
                rank.step += 1
                node.complete(rank.copy, rank.step)
                rank.copy, rank.waiting = None, dict.fromkeys(rank.holders)
            case 2 | 3 if rank.waiting:
                self.push(rank, number)
            case 4 if self.settled is not None and self.settled[0] == self.generation:
                node.settle(self.settled)
            case 5 if self.chance.random() < 0.15:
                self.lose_a_node()
        self.look()

    def push(self, rank: Rank, number: int) -> None:
        holder = self.chance.choice(list(rank.waiting))
        node, copy = self.nodes[holder], rank.waiting[holder]
        if copy is None or self.chance.random() < 0.2:  # begins, or breaks off and begins again
            node.settle(self.nodes[rank.node].books.mark)
            rank.waiting[holder] = node.begin(Line(self.generation, number, True))
        else:
            node.complete(copy, rank.step)
            del rank.waiting[holder]

    def look(self) -> None:
        """What the controller sees: a step of which every rank has said that all copies are complete."""
        complete = {rank.step if not rank.waiting else rank.step - 1 for rank in self.ranks}
        step = min(complete)
        if step > 0 and (self.settled is None or (self.generation, step) > self.settled):
            self.settled = (self.generation, step)

    def best(self, without: int | None = None) -> Mark | None:
        found = recoverable({str(at): node.books.held() for at, node in self.nodes.items() if at != without})
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


def opened(line: Line) -> Node:
    node = Node()
    node.books.open(line, Shape(1, 10), None)
    return node


OWN = Line(1, 0, False)


def write(node: Node, line: Line, step: int) -> Copy:
    copy = node.begin(line)
    assert copy is not None
    node.complete(copy, step)
    return copy


def test_an_own_snapshot_that_may_count_is_not_overwritten() -> None:
    node = opened(OWN)
    write(node, OWN, 1)
    with pytest.raises(IntegrityError, match="step 1 is not yet known to be complete on all ranks"):
        node.begin(OWN)
    node.settle((1, 1))
    write(node, OWN, 2)
    node.settle((1, 2))
    assert {item.step for item in node.books.held()} == {1, 2}


def test_what_is_not_open_or_over_is_not_written() -> None:
    node = opened(OWN)
    with pytest.raises(IntegrityError, match="not opened"):
        node.begin(Line(1, 1, False))
    copy = node.begin(OWN)
    assert copy is not None
    node.open(Line(2, 0, False), 1, None)
    with pytest.raises(Fenced):
        node.begin(OWN)
    with pytest.raises(Fenced):
        node.books.complete(copy, 1)
    with pytest.raises(Fenced):
        node.open(Line(1, 1, False), 2, None)


def test_a_line_has_one_size() -> None:
    node = opened(OWN)
    node.books.open(OWN, Shape(1, 10), None)
    with pytest.raises(IntegrityError, match="another size"):
        node.books.open(OWN, Shape(1, 11), None)


def test_steps_only_grow() -> None:
    node = opened(OWN)
    write(node, OWN, 5)
    node.settle((1, 5))
    copy = node.begin(OWN)
    assert copy is not None
    with pytest.raises(IntegrityError, match="no new snapshot"):
        node.books.complete(copy, 5)


def test_a_run_that_went_back_keeps_where_it_began() -> None:
    node = opened(OWN)
    write(node, OWN, 1)
    node.settle((1, 1))
    write(node, OWN, 2)
    node.settle((1, 2))
    node.open(Line(2, 0, False), 1, (1, 1))
    assert {item.step for item in node.books.held()} == {1}
    write(node, Line(2, 0, False), 2)
    assert {(item.generation, item.step) for item in node.books.held()} == {(1, 1), (2, 2)}


def test_generations_that_fail_one_after_the_other_do_not_pile_up() -> None:
    node = opened(OWN)
    write(node, OWN, 1)
    node.settle((1, 1))
    for generation in range(2, 50):
        line = Line(generation, 0, False)
        node.open(line, 1, None)
        write(node, line, generation)
        assert (1, 1) in {(item.generation, item.step) for item in node.books.held()}
        assert len(node.books.copies) <= 4
        assert len(node.books.lines) <= 4

"""Ranks go where their state is: by the model of even shares, and by the real layouts and plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.checkpoint.snapshots import Copies, Held, Snapshot, copies_of, place_replicas, recoverable
from elastic.core.mesh import Mesh, MeshSettings
from elastic.core.sharding.layout import Layout
from elastic.core.sharding.mesh_policy import MeshCandidate, MeshFacts, _held, _moved
from elastic.core.sharding.placement import Slot, _overlaps, members_in_order
from elastic.core.sharding.reshard import SourceIndex
from elastic.core.sharding.zero import zero3_layout, zero12_layout

# The parameters of a small Llama: what matters is that sizes differ and that few cuts fall on their ends.
MODEL = [("embed", 32_000 * 64), *((f"layer{n}.{part}", numel) for n in range(8) for part, numel in (
    ("q", 64 * 64), ("k", 64 * 16), ("v", 64 * 16), ("o", 64 * 64), ("up", 64 * 176), ("gate", 64 * 176),
    ("down", 176 * 64), ("norm", 64),
)), ("head", 32_000 * 64)]  # fmt: skip


def layout(stage: int, world_size: int) -> Layout:
    return zero3_layout([MODEL], world_size) if stage == 3 else zero12_layout([MODEL], world_size)


def held_without(nodes: Sequence[str], lost: set[str], replicas: int = 1) -> Snapshot:
    """A snapshot of one rank for each of `nodes`, after some of them are lost."""
    held: dict[str, list[Held]] = {node: [] for node in nodes}
    for rank, targets in enumerate(place_replicas(nodes, replicas)):
        for node in (nodes[rank], *targets):
            held[node].append(Held(1, 8, rank, len(nodes), node != nodes[rank]))
    (found,) = recoverable({node: copies for node, copies in held.items() if node not in lost})
    return found


def slots_of(nodes: Sequence[str], per_slot: int = 1) -> list[Slot]:
    """Workers are numbered as their ranks would be."""
    return [(node, range(n * per_slot, (n + 1) * per_slot)) for n, node in enumerate(nodes)]


def over_network(stage: int, snapshot: Snapshot, nodes: Sequence[str]) -> float:
    """The fraction of the state that the real plans of ranks on `nodes` read of other nodes."""
    before, after = layout(stage, len(snapshot.copies)), layout(stage, len(nodes))
    index = SourceIndex(before.ranks)
    read = [
        item.numel
        for node, target in zip(nodes, after.ranks, strict=True)
        for item in index.plan(target)
        if node not in snapshot.copies[item.source_rank]
    ]
    return sum(read) / sum(before.numels.values())


def ordered(nodes: Sequence[str], snapshot: Snapshot) -> list[str]:
    leader = nodes.index(snapshot.copies[0][0]) if snapshot.copies[0][0] in nodes else None
    members = members_in_order(slots_of(nodes), len(nodes), copies_of(snapshot), leader=leader)
    return [nodes[member] for member in members]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("lost", "before", "after"), [(0, 0.5, 1 / 240), (8, 0.2333, 1 / 15), (15, 0.4375, 0.0)])
def test_one_of_sixteen_nodes_is_lost(stage: int, lost: int, before: float, after: float) -> None:
    """In the order of slots, and without the copies on their own nodes, readers would ask others for up to half of the
    state; now for one rank's share at most."""
    nodes = [f"node{n}" for n in range(16)]
    snapshot = held_without(nodes, {nodes[lost]})
    survivors = [node for node in nodes if node != nodes[lost]]
    first_choice = replace(snapshot, copies=tuple(copies[:1] for copies in snapshot.copies))
    assert over_network(stage, first_choice, survivors) == pytest.approx(before, abs=0.001)
    found = ordered(survivors, snapshot)
    assert over_network(stage, snapshot, found) == pytest.approx(after, abs=0.001)
    # Whoever was there stays what it was: only what the lost one was goes to somebody else.
    assert found[:lost] == nodes[:lost]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_node_that_comes_back_gets_the_share_that_costs_least(stage: int) -> None:
    """It holds nothing: what it reads of others, one share of 16, is all that it must cost."""
    nodes = [f"node{n}" for n in range(15)]
    snapshot = held_without(nodes, set())
    grown = ["new", *nodes]
    found = ordered(grown, snapshot)
    assert over_network(stage, snapshot, found) == pytest.approx(1 / 16, abs=0.001)
    assert found[0] == nodes[0], "loggers and the like are where rank 0 was"


@given(st.integers(2, 24), st.integers(1, 2), st.integers(0, 4), st.data())
def test_never_more_than_in_the_order_of_slots(world: int, replicas: int, new: int, data: st.DataObject) -> None:
    """In units of the model, which are exact."""
    nodes = [f"node{n}" for n in range(world)]
    most = min(replicas, world - 1)
    lost = data.draw(st.sets(st.sampled_from(nodes), min_size=0 if new else 1, max_size=most))
    copies = copies_of(held_without(nodes, lost, replicas))
    after = [node for node in data.draw(st.permutations(nodes)) if node not in lost] + [f"new{n}" for n in range(new)]
    chosen = members_in_order(slots_of(after), len(after), copies)
    assert sorted(chosen) == list(range(len(after)))
    assert local(after, chosen, copies) >= local(after, range(len(after)), copies)


spans = st.lists(st.integers(0, 12), max_size=4, unique=True).map(
    lambda edges: tuple(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.lists(st.tuples(spans, spans), max_size=4))
def test_what_nodes_hold_of_blocks_is_what_a_count_of_all_units_says(
    sizes: list[int], held: list[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]]
) -> None:
    before, after = 12, sum(sizes)
    copies = Copies(before, tuple((f"n{at}", *parts) for at, parts in enumerate(held)))
    block_of = [block for block, size in enumerate(sizes) for _ in range(size * before)]
    counted: Counter[tuple[int, str]] = Counter()
    for node, first_choice, others in copies.nodes:
        for parts, weight in ((first_choice, before * after + 1), (others, before * after)):
            for begin, end in parts:
                for unit in range(begin * after, end * after):
                    counted[block_of[unit], node] += weight
    found: Counter[tuple[int, str]] = Counter()
    for block, node, gain in _overlaps(sizes, copies):
        assert gain > 0
        found[block, node] += gain
    assert found == counted


def local(nodes: Sequence[str], members: Sequence[int], copies: Copies) -> int:
    """1 / (old ranks * new ranks) of the state each: what ranks read of their own nodes."""
    held = {
        node: {unit for begin, end in (*first, *others) for unit in range(begin * len(nodes), end * len(nodes))}
        for node, first, others in copies.nodes
    }
    wanted = {rank: range(rank * copies.ranks, (rank + 1) * copies.ranks) for rank in range(len(members))}
    return sum(len(held.get(nodes[member], set()).intersection(wanted[rank])) for rank, member in enumerate(members))


def test_nothing_moves_where_nothing_has_changed_or_nothing_is_known() -> None:
    nodes = [f"node{n}" for n in range(6)]
    snapshot = held_without(nodes, set())
    assert ordered(nodes, snapshot) == nodes
    assert members_in_order(slots_of(nodes), 6, Copies()) == tuple(range(6))


def test_a_node_has_its_ranks_again_whatever_the_numbers_of_its_slot_and_workers() -> None:
    """After a recovery and a growth the ranks follow no numbers any more."""
    nodes = ["c", "a", "d", "b"]
    assert ordered(sorted(nodes), held_without(nodes, set())) == nodes


def test_workers_of_a_slot_stay_neighbours_and_a_cut_slot_stays_last() -> None:
    """Three slots of two workers, of which five are used; the first ranks' state is where the last slot is."""
    copies = Copies(6, (("c", ((0, 2),), ()), ("a", ((2, 4),), ()), ("b", ((4, 6),), ())))
    slots = slots_of(["a", "b", "c"], per_slot=2)
    assert members_in_order(slots, 6, copies) == (4, 5, 0, 1, 2, 3)
    assert members_in_order(slots, 5, copies)[:4] in ((0, 1, 2, 3), (2, 3, 0, 1))
    assert members_in_order(slots, 5, copies)[4:] == (4,)


def test_a_slot_that_stands_by_takes_the_place_of_one_that_holds_nothing() -> None:
    copies = Copies(2, (("b", ((0, 1),), ()), ("c", ((1, 2),), ())))
    assert members_in_order(slots_of(["a", "b", "c"]), 2, copies) == (1, 2)


def in_parts(shape: MeshSettings, size: int, lost: set[str], per_node: int = 1) -> tuple[Copies, list[Slot]]:
    """What is left of a snapshot of `size` ranks, whose replicas are with the same lanes, and the slots that are."""
    mesh, nodes = shape.mesh(size), [f"node{rank // per_node}" for rank in range(size)]
    lanes = {node: frozenset(mesh.lane(rank) for rank in range(size) if nodes[rank] == node) for node in nodes}
    held: dict[str, list[Held]] = {node: [] for node in nodes}
    for rank, targets in enumerate(place_replicas(nodes, 1, shares=lanes)):
        for node in (nodes[rank], *targets):
            held[node].append(Held(1, 8, rank, size, node != nodes[rank]))
    (found,) = recoverable({node: copies for node, copies in held.items() if node not in lost})
    slots = [
        (node, range(n * per_node, (n + 1) * per_node))
        for n, node in enumerate(dict.fromkeys(nodes))
        if node not in lost
    ]
    return copies_of(found), slots


def moved(shape: MeshSettings, size: int, copies: Copies, before: Mesh, slots: list[Slot], ordered: bool) -> float:
    """The share of the state that crosses the network, as the mesh policy counts it."""
    node_of = {worker: node for node, workers in slots for worker in workers}
    meshes = (before, shape.mesh(size)) if ordered else (None, None)
    members = members_in_order(slots, size, copies, shape.cell, None, *meshes)
    assert len(set(members)) == size
    facts = MeshFacts(
        shape, size, before=before, copies=copies, nodes_of=lambda _, mesh: [node_of[worker] for worker in members]
    )
    found = _moved(facts, MeshCandidate({}, size), _held(facts))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "size", "lost", "after", "per_node", "most"),
    [
        # 16 nodes with a stage each: of four of a stage one is lost.
        (MeshSettings(pp=4), 16, "node5", 12, 1, 1 / 12),
        (MeshSettings(pp=4), 16, "node0", 12, 1, 1 / 12),
        # Two stages to the node, and stages of sliced layers.
        (MeshSettings(pp=4), 16, "node2", 12, 2, 1 / 8),
        (MeshSettings(tp=2, pp=2), 16, "node3", 12, 2, 1 / 8),
        # Nothing is lost with a node that comes back with nothing.
        (MeshSettings(pp=4), 12, "", 12, 1, 0.0),
    ],
)
def test_nodes_with_parts_of_cells_keep_their_parts(
    shape: MeshSettings, size: int, lost: str, after: int, per_node: int, most: float
) -> None:
    """In the order of slots each node behind the lost one got another stage, and read all of it."""
    copies, slots = in_parts(shape, size, {lost}, per_node)
    before = shape.mesh(size)
    assert moved(shape, after, copies, before, slots, ordered=True) <= most
    if lost:
        assert moved(shape, after, copies, before, slots, ordered=False) > 0.3


@given(st.sampled_from([(1, 4), (2, 4), (4, 2), (2, 2)]), st.integers(2, 5), st.integers(1, 2), st.data())
def test_parts_of_cells_never_move_more_than_in_the_order_of_slots(
    axes: tuple[int, int], cells: int, per_node: int, data: st.DataObject
) -> None:
    shape = MeshSettings(tp=axes[0], pp=axes[1])
    size = shape.cell * cells
    gone = f"node{data.draw(st.integers(0, size // per_node - 1))}"
    copies, slots = in_parts(shape, size, {gone}, per_node)
    before, after = shape.mesh(size), size - shape.cell
    moves = [moved(shape, after, copies, before, slots, ordered) for ordered in (True, False)]
    assert moves[0] <= moves[1]


def test_cells_stay_whole_and_parts_of_cells_stay_where_they_are() -> None:
    copies = Copies(4, (("b", ((0, 2),), ()), ("a", ((2, 4),), ())))
    assert members_in_order(slots_of(["a", "b"], per_slot=2), 4, copies, cell=2) == (2, 3, 0, 1)
    assert members_in_order(slots_of(["a", "b"], per_slot=2), 4, copies, cell=4) == (0, 1, 2, 3)

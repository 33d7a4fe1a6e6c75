"""Where replicas go, what can be put together from what nodes hold, and what the machine makes of it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import (
    Copies,
    Held,
    copies_of,
    is_snapshot,
    one_by_one,
    parse_snapshot_id,
    place_replicas,
    recoverable,
    snapshot_id,
    together,
)
from elastic.core.errors import IntegrityError
from elastic.core.run import machine
from elastic.core.run.phase import Finished, Joining, Pausing, Training, Waiting

CLUSTERS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=24).map(
    lambda ranks: [f"n{domain}-{node}" for domain, node in ranks]
)


def domain_of(node: str) -> str:
    return node.split("-")[0]


# --- placement ---


@given(CLUSTERS, st.integers(0, 3))
def test_every_shard_has_as_many_copies_on_other_nodes_as_there_can_be(ranks: list[str], count: int) -> None:
    nodes = set(ranks)
    for node, targets in zip(ranks, place_replicas(ranks, count), strict=True):
        assert len(targets) == len(set(targets)) == min(count, len(nodes) - 1)
        assert node not in targets
        assert set(targets) <= nodes


@given(CLUSTERS, st.integers(1, 3), st.data())
def test_as_many_nodes_as_there_are_replicas_may_be_lost_at_once(
    ranks: list[str], count: int, data: st.DataObject
) -> None:
    nodes = sorted(set(ranks))
    placed = place_replicas(ranks, count)
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=min(count, len(nodes) - 1)))
    held: dict[str, list[Held]] = {node: [] for node in nodes if node not in lost}
    for rank, node in enumerate(ranks):
        for holder in (node, *placed[rank]):
            if holder not in lost:
                held[holder].append(Held(3, 40, rank, len(ranks), holder != node))
    (found,) = recoverable(held)
    assert (found.step, found.generation) == (40, 3)
    assert not lost.intersection(found.holders)


@given(CLUSTERS)
def test_a_whole_domain_may_be_lost_where_no_domain_is_more_than_half(ranks: list[str]) -> None:
    nodes = set(ranks)
    sizes = Counter(domain_of(node) for node in nodes)
    placed = place_replicas(ranks, 1, {node: domain_of(node) for node in nodes})
    if 2 * max(sizes.values()) <= len(nodes):
        for node, targets in zip(ranks, placed, strict=True):
            assert [domain_of(target) for target in targets] != [domain_of(node)]


@given(CLUSTERS, st.integers(1, 2))
def test_nobody_holds_more_replicas_than_others(ranks: list[str], count: int) -> None:
    by_node = dict(zip(ranks, place_replicas(ranks, count), strict=True))
    load = Counter(target for targets in by_node.values() for target in targets)
    assert len({load[node] for node in by_node}) <= 1


def test_two_replicas_are_in_two_other_domains_where_there_are_three() -> None:
    ranks = ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]
    for node, targets in zip(ranks, place_replicas(ranks, 2, {n: domain_of(n) for n in ranks}), strict=True):
        assert {domain_of(t) for t in targets} == {"a", "b", "c"} - {domain_of(node)}


def test_replicas_are_with_the_ranks_before_where_these_are_in_other_domains() -> None:
    ranks = ["a-0", "b-0", "a-1", "b-1", "a-2", "b-2"]
    placed = place_replicas(ranks, 1, {node: domain_of(node) for node in ranks}, spare=2)
    assert [targets[0] for targets in placed] == [ranks[-1], *ranks[:-1]]
    assert {len(targets) for targets in placed} == {3}


@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 2))
def test_replicas_are_on_nodes_with_the_same_share(stages: int, cells: int, count: int) -> None:
    """Stages of a pipeline on nodes of their own: what a stage reads of a lost one is on its own nodes then."""
    nodes = [f"n{number}" for number in range(stages * cells)]
    stage = {node: number % stages for number, node in enumerate(nodes)}
    placed = place_replicas(nodes, count, shares=stage)
    if cells > count:
        assert all(stage[target] == stage[node] for node, found in zip(nodes, placed, strict=True) for target in found)
    else:
        assert placed == place_replicas(nodes, count)
    assert all(node not in found and len(set(found)) == len(found) for node, found in zip(nodes, placed, strict=True))


def test_a_failure_domain_counts_more_than_a_share() -> None:
    """A stage in each rack: its nodes are lost together."""
    nodes = [f"{rack}-{number}" for number in range(3) for rack in "ab"]
    racks = {node: domain_of(node) for node in nodes}
    placed = place_replicas(nodes, 1, racks, shares=racks)
    assert all(domain_of(target) != domain_of(node) for node, (target,) in zip(nodes, placed, strict=True))
    across = {node: number // 2 % 3 for number, node in enumerate(nodes)}
    placed = place_replicas(nodes, 1, racks, shares=across)
    assert all(across[target] == across[node] for node, (target,) in zip(nodes, placed, strict=True))
    assert all(domain_of(target) != domain_of(node) for node, (target,) in zip(nodes, placed, strict=True))


def held_by(nodes: list[str]) -> dict[str, list[Held]]:
    """What the nodes hold when one snapshot is complete on all of them, with one replica of each shard."""
    held: dict[str, list[Held]] = {node: [] for node in nodes}
    for rank, (node, targets) in enumerate(zip(nodes, place_replicas(nodes, 1), strict=True)):
        held[node].append(Held(1, 8, rank, len(nodes), replica=False))
        for target in targets:
            held[target].append(Held(1, 8, rank, len(nodes), replica=True))
    return held


@given(st.permutations("abcde"))
def test_two_nodes_may_be_lost_whose_ranks_are_no_neighbours(nodes: list[str]) -> None:
    """Whatever the nodes are called, which is Ray's choice: in the order of their names one run in two had the only
    replica of a lost rank on the other lost node."""
    for lost in ({0, 2}, {0, 3}, {1, 3}, {1, 4}, {2, 4}):
        held = {node: copies for node, copies in held_by(nodes).items() if nodes.index(node) not in lost}
        assert [found.step for found in recoverable(held)] == [8]


# --- what can be put together ---


def test_a_snapshot_needs_every_rank_of_one_world_size() -> None:
    whole = [Held(1, 8, rank, 3, False) for rank in range(3)]
    assert [s.step for s in recoverable({"a": whole[:2], "b": whole[2:]})] == [8]
    assert recoverable({"a": whole[:2]}) == ()
    assert recoverable({"a": whole[:2], "b": [Held(1, 8, 2, 4, False)]}) == ()
    assert recoverable({"a": whole[:2], "b": [Held(2, 8, 2, 3, False)]}) == ()


def test_every_copy_is_known_and_told_by_node() -> None:
    held = {"a": [Held(1, 8, 0, 3, True), Held(1, 8, 1, 3, False)], "b": [Held(1, 8, rank, 3, True) for rank in (0, 1)]}
    held["c"] = [Held(1, 8, 2, 3, False), Held(1, 8, 2, 3, True)]
    (found,) = recoverable(held)
    assert found.copies == (("a", "b"), ("a", "b"), ("c",))
    assert copies_of(found) == Copies(3, (("a", ((0, 2),), ()), ("b", (), ((0, 2),)), ("c", ((2, 3),), ())))


SHARDS = st.builds(Held, st.just(1), st.integers(8, 9), st.integers(0, 5), st.just(6), st.booleans())


@given(st.dictionaries(st.sampled_from("abcde"), st.sets(SHARDS, max_size=24), max_size=5))
def test_what_nodes_tell_of_many_ranks_at_once_is_what_they_tell_of_each(held: dict[str, set[Held]]) -> None:
    told = {node: together(copies) for node, copies in held.items()}
    for node, copies in held.items():
        assert sorted(one_by_one(told[node])) == sorted(copies)
        assert all(one.stop != other.rank or one.replica != other.replica or one.step != other.step
                   for one in told[node] for other in told[node])  # fmt: skip
    found = recoverable(told)
    assert found == recoverable(held)
    for snapshot in found:
        by_rank: list[list[tuple[bool, str]]] = [[] for _ in range(6)]
        for node, copies in held.items():
            for copy in copies:
                if copy.step == snapshot.step:
                    by_rank[copy.rank].append((copy.replica, node))
        # Own ones first, then by name; each node once.
        assert snapshot.copies == tuple(tuple(dict.fromkeys(node for _, node in sorted(have))) for have in by_rank)


def test_what_parity_offers_is_told_rank_by_rank() -> None:
    offered = tuple(Held(1, 8, rank, 3, False, stripe=(0, 1, 2)) for rank in range(3))
    assert together(offered) == offered


def test_a_ranks_own_node_is_read_before_its_replicas() -> None:
    held = {"a": [Held(1, 8, 0, 2, True), Held(1, 8, 1, 2, False)], "b": [Held(1, 8, 0, 2, False)]}
    (found,) = recoverable(held)
    assert found.holders == ("b", "a")


def test_the_newest_generation_is_the_truth_even_where_it_went_back_in_steps() -> None:
    held = {"a": [Held(1, 9, 0, 1, False), Held(2, 8, 0, 1, False), Held(2, 7, 0, 1, False)]}
    assert [(s.generation, s.step) for s in recoverable(held)] == [(2, 8), (2, 7), (1, 9)]


def test_names_of_snapshots_are_not_names_of_checkpoints() -> None:
    name = snapshot_id(40, 3)
    assert is_snapshot(name)
    assert not is_snapshot("step-00000040-g0003")
    assert parse_snapshot_id(name) == (40, 3)
    for bad in ("step-00000040-g0003", "memory:", "memory:../x", "memory:step-40-g3"):
        with pytest.raises(IntegrityError):
            parse_snapshot_id(bad)


# --- the machine ---


def lost(snapshots: tuple[tuple[str, int], ...], committed: int | None = None) -> Scenario:
    """Three workers train, one is lost at step 17, the others have left, and the nodes have answered."""
    run = Scenario(2, 3, memory=True).started(3)
    if committed is not None:
        run.commit(committed)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2)
    assert isinstance(run.state.phase, Waiting)
    survey = run.state.saved.survey
    assert survey is not None
    return run.do(ev.SnapshotsReported(survey.number, snapshots))


def begun(run: Scenario) -> act.BeginGeneration:
    (action,) = [a for a in run.last if isinstance(a, act.BeginGeneration)]
    return action


def test_the_next_generation_begins_from_the_newest_snapshot() -> None:
    run = lost(((snapshot_id(16, 1), 16), (snapshot_id(15, 1), 15)), committed=10)
    assert (begun(run).checkpoint, begun(run).step) == (snapshot_id(16, 1), 16)
    assert run.state.trouble.incident is not None
    assert (run.state.trouble.incident.source, run.state.trouble.incident.steps_repeated) == ("memory", 1)


# Node 0 has what rank 1 of two will read, and node 2 what rank 0 will.
CROSSED = (("node-2", ((0, 2),), ()), ("node-0", ((2, 3),), ()))


def crossed(snapshot: bool = True, copies: tuple[object, ...] = CROSSED) -> Scenario:
    run = Scenario(2, 3, memory=True).started(3).commit(10)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2)
    found = ((snapshot_id(16, 1), 16),) if snapshot else ()
    # As the journal has it.
    told = {"event": "SnapshotsReported", "survey": run.state.saved.surveys, "snapshots": found, "ranks": 3}
    told |= {"copies": copies} if copies else {}
    return run.do(ev.from_json(json.loads(json.dumps(told))))


def test_ranks_go_where_their_state_is() -> None:
    run = crossed()
    assert begun(run).members == run.state.members == (2, 0)
    assert run.state.saved.copies == Copies(), "a replay point of a large run must not carry it along"
    state = machine.initial(run.state.settings, 1000.0)
    for event, now in run.journal:
        state, _ = machine.step(state, ev.from_json(json.loads(json.dumps(ev.to_json(event)))), now)
    assert state == run.state, "a replay must find the same ranks"


def test_without_a_word_on_copies_ranks_follow_the_slots() -> None:
    """So that a journal of an earlier release is replayed as it happened; and from storage it makes no difference."""
    assert begun(crossed(copies=())).members == (0, 2)
    assert begun(crossed(snapshot=False)).members == (0, 2)


def test_storage_is_used_where_it_is_further_or_memory_holds_nothing() -> None:
    assert begun(lost(((snapshot_id(9, 1), 9),), committed=10)).checkpoint == "c10"
    assert begun(lost((), committed=10)).checkpoint == "c10"
    assert begun(lost(())).checkpoint is None


def test_nobody_waits_for_ever_for_an_answer() -> None:
    run = Scenario(2, 3, memory=True).started(3).commit(10)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2)
    assert isinstance(run.state.phase, Waiting)
    run.wait(run.state.settings.failures.survey_timeout_s)
    assert begun(run).checkpoint == "c10"
    assert any(isinstance(a, act.Note) and "no node has reported its snapshots in time" in a.sentence for a in run.last)


def test_an_answer_to_an_older_question_changes_nothing() -> None:
    run = Scenario(2, 3, memory=True).started(3)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2)
    before = run.state
    assert before.saved.survey is not None
    run.do(ev.SnapshotsReported(before.saved.survey.number - 1, ((snapshot_id(17, 1), 17),)))
    assert run.state == before


def test_a_refused_snapshot_is_passed_over_for_the_next_and_then_for_storage() -> None:
    found = ((snapshot_id(16, 1), 16), (snapshot_id(15, 1), 15))
    run = lost(found, committed=10)
    for refused, then in ((16, snapshot_id(15, 1)), (15, "c10")):
        number, members = run.state.generation, run.state.members
        run.do(ev.RestoreFailed(number, members[0], snapshot_id(refused, 1), "content check failed"))
        run.left(refused, *members)
        run.wait(1.0)
        if run.state.saved.survey is not None:
            run.do(ev.SnapshotsReported(run.state.saved.survey.number, found))
        assert isinstance(run.state.phase, Joining)
        assert run.state.base is not None
        assert run.state.base.id == then


def test_a_node_lost_while_waiting_makes_the_answer_void() -> None:
    run = Scenario(3, 3, memory=True).started(3)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2)
    assert run.state.saved.survey is not None
    run.do(ev.SnapshotsReported(run.state.saved.survey.number, ((snapshot_id(16, 1), 16),)))
    assert run.state.saved.newest_snapshot is not None
    slot = run.state.fleet.workers[2].slot
    run.do(ev.SlotLost(slot, "gone"))
    assert run.state.saved.newest_snapshot is None
    assert [a for a in run.last if isinstance(a, act.QuerySnapshots)]


def test_a_stop_keeps_what_is_in_memory_only() -> None:
    """It comes between two generations: one more is begun, which saves."""
    run = Scenario(2, 3, memory=True).started(3).commit(10)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2).do(ev.StopRequested("enough"))
    survey = run.state.saved.survey
    assert survey is not None
    run.do(ev.SnapshotsReported(survey.number, ((snapshot_id(16, 1), 16),)))
    assert begun(run).step == 16
    run.train()
    assert [type(action) for action in run.last if isinstance(action, act.ProposeStop)] == [act.ProposeStop]
    run.do(*(ev.StopPromised(run.state.generation, worker, 17, True) for worker in run.state.members))
    run.left(17)
    assert isinstance(run.phase, Pausing), "storage has not taken it yet"
    assert run.commit(17).end == ("stopped", "enough")


def test_a_stop_waits_for_nothing_else() -> None:
    run = Scenario(2, 3, memory=True).started(3).commit(10)
    run.do(ev.WorkerDied(1, "exit code -9")).left(17, 0, 2).do(ev.StopRequested("enough"))
    survey = run.state.saved.survey
    assert survey is not None
    run.do(ev.SnapshotsReported(survey.number, ((snapshot_id(10, 1), 10),)))
    assert run.end == ("stopped", "enough"), "storage has it all"

    run = lost(((snapshot_id(16, 1), 16),), committed=10).do(ev.WorkerDied(0, "exit code -9")).left(16, 2)
    assert run.do(ev.StopRequested("enough")).end == ("stopped", "enough"), "too few workers are left"


def test_a_stop_does_not_try_again_and_again() -> None:
    run = Scenario(2, 3, memory=True).started(3).commit(10).do(ev.StopRequested("enough"))
    for _ in range(2):
        run.do(ev.CollectiveFailed(run.state.generation, run.state.members[0], 17, "peer closed")).left(17)
        assert isinstance(run.phase, Waiting | Finished)
        if run.state.saved.survey is not None:
            run.do(ev.SnapshotsReported(run.state.saved.survey.number, ((snapshot_id(16, 1), 16),)))
    assert run.end == ("stopped", "enough")


def growing(memory: bool) -> Scenario:
    run = Scenario(2, 3, memory=True).started(2).nodes(1)
    members = run.state.members
    return run.do(*(ev.StopPromised(run.state.generation, worker, 5, memory) for worker in members))


def test_growth_goes_through_memory_without_waiting_for_storage() -> None:
    run = growing(memory=True)
    (confirm,) = [a for a in run.last if isinstance(a, act.CommitStop)]
    assert not confirm.durable
    run.left(5)
    assert run.state.saved.survey is not None
    run.do(ev.SnapshotsReported(run.state.saved.survey.number, ((snapshot_id(5, 1), 5),)))
    assert (begun(run).step, len(begun(run).members)) == (5, 3)
    assert run.train().state.phase == Training(run.state.phase.since, first_step_done=True)


def test_growth_waits_for_storage_where_one_memory_fails() -> None:
    run = growing(memory=False)
    (confirm,) = [a for a in run.last if isinstance(a, act.CommitStop)]
    assert confirm.durable
    run.left(5)
    assert run.state.saved.survey is None
    run.commit(5)
    assert run.state.saved.survey is not None

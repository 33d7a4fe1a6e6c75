"""Silence, hangs and step reports: what the detector's tables say about what they were fed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.liveness import HangLimit, LastSeen, ProgressWatch

BEAT_S, LIMIT_S = 0.2, 1.0


class Cluster:
    """Two nodes with two workers each, beating every BEAT_S; the table is checked after every beat."""

    def __init__(self) -> None:
        self.table = LastSeen(BEAT_S)
        self.now = 0.0
        self.silences: list[tuple[float, Any]] = []

    def run(self, seconds: float, frozen: tuple[str, ...] = (), stuck: tuple[int, ...] = ()) -> None:
        began = self.now
        for _ in range(round(seconds / BEAT_S)):
            self.now = round(self.now + BEAT_S, 6)
            for node, workers in {"a": (0, 1), "b": (2, 3)}.items():
                ages = {w: self.now - began + 0.05 if w in stuck else 0.05 for w in workers}
                if node not in frozen:
                    self.table.heard_node(node, self.now, ages)
            self.check()

    def check(self) -> Any:
        found = self.table.silent(self.now, LIMIT_S)
        if found is not None:
            self.silences.append((self.now, found))
        return found


def test_who_hears_nobody_of_several_accuses_nobody_until_the_lease_is_over() -> None:
    table = LastSeen(BEAT_S, alone_s=120.0)
    for second in range(10):
        for worker, node in enumerate(("a", "b")):
            table.heard_node(node, float(second), {worker: 0.0})
    for tenth in range(100, 1200, 2):
        assert table.silent(tenth / 10, 1.0) is None
    assert table.alone(60.0, 1.0)
    silence = table.silent(131.0, 1.0)
    assert silence is not None
    assert silence.nodes == ("a", "b")


def test_after_an_outage_the_others_get_as_long_to_be_heard_again() -> None:
    table = LastSeen(BEAT_S, alone_s=120.0)
    for worker, node in enumerate(("a", "b")):
        table.heard_node(node, 0.0 - 0.1 * worker, {worker: 0.0})
    for tenth in range(2, 100, 2):
        assert table.silent(tenth / 10, 1.0) is None, "the first to be overdue is not accused by itself"
    for tenth in range(100, 190, 2):
        table.heard_node("a", tenth / 10, {0: 0.0})
        assert table.silent(tenth / 10, 1.0) is None
    for tenth in range(190, 230, 2):
        table.heard_node("a", tenth / 10, {0: 0.0})
        silence = table.silent(tenth / 10, 1.0)
        if silence is not None:
            break
    assert silence is not None
    assert silence.nodes == ("b",)


@pytest.mark.parametrize(("later", "accused"), [(0.6, False), (1.4, True)])
def test_the_last_node_that_fell_silent_with_one_that_was_lost_is_not_accused_by_itself(
    later: float, accused: bool
) -> None:
    """Seen on cores with too much to do: two agents were silent for a second and a half, the first was given up, the
    second was the only one then, and with both the run had lost all of its memory."""
    table = LastSeen(BEAT_S, alone_s=120.0)
    for tenth in range(0, 11):
        table.heard_node("a", tenth / 10, {0: 0.0})
        table.heard_node("b", tenth / 10, {1: 0.0})
    table.heard_node("b", 1.0 + later, {1: 0.0})
    for tenth in range(11, 25):
        if (silence := table.silent(tenth / 10, LIMIT_S)) is not None:
            assert silence.nodes == ("a",)
            break
    table.retain([1], ["b"])
    found = [silence.nodes for tenth in range(25, 60) if (silence := table.silent(tenth / 10, LIMIT_S)) is not None]
    assert (("b",) in found) is accused
    assert table.alone(5.0, LIMIT_S) is not accused
    table.heard_node("b", 6.0, {1: 0.0})
    found = [silence.nodes for tenth in range(60, 160) if (silence := table.silent(tenth / 10, LIMIT_S)) is not None]
    assert ("b",) in found, "heard since, it is one by itself"


def test_one_node_that_is_heard_is_enough_to_accuse_the_other() -> None:
    table = LastSeen(BEAT_S, alone_s=120.0)
    for tenth in range(0, 100, 2):
        table.heard_node("a", tenth / 10, {0: 0.0})
        if tenth < 50:
            table.heard_node("b", tenth / 10, {1: 0.0})
    assert not table.alone(10.0, 1.0)
    silence = table.silent(10.0, 1.0)
    assert silence is not None
    assert silence.nodes == ("b",)


def test_beating_workers_are_never_suspected() -> None:
    cluster = Cluster()
    cluster.run(20)
    assert cluster.silences == []


def test_a_frozen_node_is_suspected_with_all_of_its_workers_once_per_limit() -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.run(3, frozen=("b",))
    times = [time - 2 for time, _ in cluster.silences]
    assert times == pytest.approx([1.2, 2.4])
    assert all(found.workers == (2, 3) and found.nodes == ("b",) for _, found in cluster.silences)
    assert cluster.silences[0][1].silence_s == pytest.approx(1.2, abs=0.1)


def test_a_stuck_worker_is_suspected_alone() -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.run(2, stuck=(3,))
    assert [(found.workers, found.nodes) for _, found in cluster.silences] == [((3,), ())]


def test_a_late_agent_does_not_condemn_its_workers_one_by_one() -> None:
    table = LastSeen(BEAT_S)
    table.heard_node("a", 10.0, {0: 0.5, 1: 0.0})
    for tick in range(1, 5):
        table.heard_node("b", 10.0 + tick * BEAT_S, {2: 0.0})
        # Worker 0 was last heard 1.3 s ago, of which the agent accounts for 0.8 s.
        assert table.silent(10.0 + tick * BEAT_S, LIMIT_S) is None
    table.heard_node("a", 10.9, {0: 0.1, 1: 0.1})
    assert table.silent(11.0, LIMIT_S) is None


def test_a_worker_that_speaks_for_itself_acquits_itself_and_its_node_where_nobody_is_probed() -> None:
    table = LastSeen(BEAT_S)
    table.heard_node("a", 0.0, {0: 0.0, 1: 0.0})
    found = []
    for tick in range(1, 8):
        table.heard_worker(1, "a", tick * BEAT_S)
        found.append(table.silent(tick * BEAT_S, LIMIT_S, agents=False))
    assert [(f.workers, f.nodes) for f in found if f is not None] == [((0,), ())]


def test_an_answer_ends_the_silence_and_the_next_one_is_new() -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.run(1.2, frozen=("b",))
    cluster.run(1)
    cluster.run(1.2, frozen=("b",))
    assert [time for time, _ in cluster.silences] == pytest.approx([3.2, 5.4])


def test_the_forgotten_are_not_suspected_and_not_brought_back_by_late_beats() -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.table.forget_worker(3)
    cluster.table.retain((2,), ("b",))
    cluster.run(2, frozen=("a",))
    assert cluster.silences == []
    cluster.run(2, frozen=("a", "b"))
    assert {w for _, found in cluster.silences for w in found.workers} == {2}


def test_workers_that_died_while_nobody_listened_are_missed() -> None:
    table = LastSeen(BEAT_S)
    for worker, node in ((0, "a"), (1, "a"), (2, "b")):
        table.expect(worker, node, 100.0)
    table.heard_node("b", 100.1, {2: 0.0})
    found = [table.silent(100.0 + tick * BEAT_S, LIMIT_S) for tick in range(6)]
    table.heard_node("b", 101.1, {2: 0.0})
    found.append(table.silent(101.2, LIMIT_S))
    assert [(f.workers, f.nodes) for f in found if f is not None] == [((0, 1), ("a",))]


def test_who_has_not_found_a_new_controller_yet_is_not_silent() -> None:
    table = LastSeen(BEAT_S)
    for worker, node in ((0, "a"), (1, "b")):
        table.expect(worker, node, 102.0)
    found = {}
    for tick in range(21):
        now = 100.0 + tick * BEAT_S
        table.heard_node("b", now, {1: 0.0})
        if silence := table.silent(now, LIMIT_S):
            found[now] = silence
    assert [(told.workers, told.nodes) for told in found.values()] == [((0,), ("a",))]
    assert min(found) > 102.0 + LIMIT_S


@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_last_node_left_is_accused_as_soon_as_any_other(others: int) -> None:
    table = LastSeen(BEAT_S, alone_s=120.0)
    nodes = ["last", *(f"gone-{number}" for number in range(others))]
    for tenth in range(0, 50, 2):
        for worker, node in enumerate(nodes):
            table.heard_node(node, tenth / 10, {worker: 0.0})
    # The others were lost, drained or evicted.
    table.retain((0,), ("last",))
    for tenth in range(50, 62, 2):
        silence = table.silent(tenth / 10, LIMIT_S)
        if silence is not None:
            break
    assert silence is not None
    assert silence.nodes == ("last",)


def test_retain_keeps_only_the_machines_own_workers() -> None:
    cluster = Cluster()
    cluster.run(1)
    cluster.table.retain((0, 1), ("a", "b"))
    cluster.run(3, frozen=("b",))
    assert cluster.silences == []


@pytest.mark.parametrize("pause_s", [0.6, 1.1, 5.0, 300.0])
def test_an_observer_that_was_not_scheduled_accuses_nobody(pause_s: float) -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.now += pause_s
    assert cluster.check() is None
    cluster.run(3)
    assert cluster.silences == []


def test_one_message_read_after_the_pause_does_not_end_the_grace_for_the_others() -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.now += 5
    cluster.table.heard_node("a", cluster.now, {0: 0.1, 1: 0.1})
    assert cluster.check() is None
    cluster.run(2)
    assert cluster.silences == []


def test_who_is_still_silent_after_the_grace_is_suspected() -> None:
    cluster = Cluster()
    cluster.run(2)
    cluster.now += 5
    assert cluster.check() is None
    cluster.run(BEAT_S, frozen=("b",))
    assert [found.nodes for _, found in cluster.silences] == [("b",)]


def test_an_observer_that_is_always_late_still_notices_that_all_are_gone() -> None:
    cluster = Cluster()
    cluster.run(2)
    for _ in range(3):
        cluster.now += 2 * LIMIT_S
        cluster.check()
    assert cluster.silences
    assert cluster.silences[0][1].nodes == ("a", "b")


@dataclass
class OneByOne:
    """What `LastSeen` must find, from every age of every beat, looked at one by one."""

    nodes: dict[str, float] = field(default_factory=dict)
    workers: dict[int, tuple[str, float]] = field(default_factory=dict)
    reported: dict[int, float] = field(default_factory=dict)

    def heard(self, worker: int, node: str, when: float) -> None:
        if when > self.workers.get(worker, (node, -1.0))[1]:
            self.workers[worker] = node, when

    def due(self, now: float) -> list[int]:
        silent = [
            worker
            for worker, (node, seen) in self.workers.items()
            if now - seen > LIMIT_S and max(self.nodes[node] - seen, now - self.nodes[node]) > LIMIT_S
        ]
        for worker in silent:
            if self.workers[worker][1] > self.reported.get(worker, now):
                del self.reported[worker]
        found = sorted(w for w in silent if w not in self.reported or now - self.reported[w] > LIMIT_S)
        self.reported.update(dict.fromkeys(found, now))
        return found


# Of each tick: the ages that a node's agent tells, of the workers that it names; and workers that speak themselves.
AGES = st.one_of(
    st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.3, 4.0])),
    st.dictionaries(st.integers(0, 3), st.just(0.0)),
)
TICK = st.tuples(st.lists(st.tuples(st.sampled_from("ab"), AGES), max_size=2), st.lists(st.integers(0, 3), max_size=1))


@given(st.lists(TICK, min_size=10, max_size=60))
def test_beats_that_are_kept_as_they_come_say_what_their_ages_say_one_by_one(
    ticks: list[tuple[list[tuple[str, dict[int, float]]], list[int]]],
) -> None:
    table, wanted = LastSeen(BEAT_S), OneByOne()
    for tick, (beats, speaking) in enumerate(ticks, start=1):
        now = round(10.0 + tick * BEAT_S, 6)
        for node, ages in beats:
            # Workers 0 to 3 are on node a, 4 to 7 on node b.
            told = {worker + 4 * (node == "b"): age_s for worker, age_s in ages.items()}
            if any(told.values()):
                table.heard_node(node, now, told)
            else:
                table.heard_quiet((node,), (tuple(told),), now)
            wanted.nodes[node] = now
            for worker, age_s in told.items():
                wanted.heard(worker, node, now - age_s)
        for worker in speaking if "a" in wanted.nodes else ():
            table.heard_worker(worker, "a", now)
            wanted.heard(worker, "a", now)
        found = table.silent(now, LIMIT_S, agents=False)
        assert list(found.workers if found else ()) == wanted.due(now)


# --- hangs -----------------------------------------------------------------------------------------------------------


def test_the_hang_limit_learns_from_the_last_64_steps() -> None:
    limit = HangLimit(floor_s=5.0, factor=10.0, first_s=120.0)
    assert (limit.limit(), limit.limit(first_step=True)) == (5.0, 120.0)
    for _ in range(64):
        limit.add(0.1)
    limit.add(1000.0)
    assert limit.limit() == 5.0
    for _ in range(64):
        limit.add(2.0)
    assert limit.limit() == 20.0
    for _ in range(64):
        limit.add(30.0)
    assert (limit.limit(), limit.limit(first_step=True)) == (300.0, 300.0)


def watch_until(watch: ProgressWatch, start: float, end: float, training: bool = True) -> list[Any]:
    ticks = [start + n * 0.5 for n in range(int((end - start) / 0.5) + 1)]
    found = [watch.check(3, 40, now, training, behind=(7,)) for now in ticks]
    return [fact for fact in found if fact is not None]


def test_a_stall_is_reported_after_the_limit_and_again_after_another() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0, first_s=20.0))
    watch_until(watch, 0, 1)
    watch.step_ended(3, 41, 1.0)
    facts = watch_until(watch, 1.5, 12.5)
    assert [(f.generation, f.step, f.stalled_s, f.limit_s, f.behind) for f in facts] == [
        (3, 41, 5.5, 5.0, (7,)), (3, 41, 5.5, 5.0, (7,)),
    ]  # fmt: skip


def test_a_generations_first_step_has_the_longer_limit() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0, first_s=20.0))
    assert watch_until(watch, 0, 20) == []
    assert watch_until(watch, 20.5, 20.5)[0].limit_s == 20.0


def test_time_outside_training_does_not_count() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0))
    assert watch_until(watch, 0, 60, training=False) == []
    assert watch_until(watch, 60.5, 65) == []
    assert len(watch_until(watch, 65.5, 66)) == 1


def test_repeated_and_old_steps_are_no_progress() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0))
    watch_until(watch, 0, 1)
    watch.step_ended(3, 41, 1.0)
    watch.step_ended(3, 41, 4.0)
    watch.step_ended(2, 99, 5.0)
    assert len(watch_until(watch, 1.5, 6.5)) == 1


def test_a_watcher_that_slept_does_not_call_it_a_hang() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0))
    watch_until(watch, 0, 1)
    watch.step_ended(3, 41, 1.0)
    assert watch.check(3, 40, 100.0, training=True) is None
    assert watch_until(watch, 100.5, 105) == []
    assert len(watch_until(watch, 105.5, 105.5)) == 1


def test_progress_without_steps_is_no_standstill() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0))
    watch.step_ended(1, 1, 0.0)
    found = []
    for second in range(1, 40):
        if second <= 20:
            watch.moved(1, float(second))
        stalled = watch.check(1, 0, float(second), True)
        found += [second] if stalled else []
    assert found[0] == 26


def test_progress_of_an_older_generation_counts_for_nothing() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0))
    watch.step_ended(2, 1, 0.0)
    stalled = []
    for second in range(1, 10):
        watch.moved(1, float(second), over=True)
        stalled.append(watch.check(2, 0, float(second), True))
    assert any(stalled)


def test_after_the_last_step_nothing_is_expected() -> None:
    watch = ProgressWatch(HangLimit(5.0, 10.0))
    watch.step_ended(3, 40, 0.0)
    watch.moved(3, 0.0, over=True)
    assert watch_until(watch, 0.0, 1000.0) == []


def test_an_agent_that_is_silent_is_reported_although_its_workers_speak() -> None:
    """Step reports come from the workers themselves: while they train at full speed no worker is ever silent."""
    table = LastSeen(BEAT_S)
    for node, worker in (("a", 0), ("b", 1)):
        table.heard_node(node, 0.0, {worker: 0.0})
    found = []
    for tick in range(1, 101):
        now = tick / 20
        table.heard_node("a", now, {0: 0.0})
        table.heard_worker(1, "b", now)
        if silence := table.silent(now, LIMIT_S):
            found.append((now, silence))
        assert tick % 20 or table.silent(now, LIMIT_S, agents=False) is None
    assert {(silence.workers, silence.nodes) for _, silence in found} == {((1,), ("b",))}
    times = [now for now, _ in found]
    assert min(later - earlier for earlier, later in pairwise(times)) > LIMIT_S
    assert len(times) >= 3
    table.heard_node("b", 5.0, {1: 0.0})
    assert table.silent(5.5, LIMIT_S) is None

"""Runs that share a cluster: no deadlock, no flapping, nothing that trains is stopped, and priority is kept to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.policy.priority_sharing import HOLD_S, Claim, Held, Share, deal, decide

SLOT = {"CPU": 1.0}


def claim(run: str, held: int, wanted: int = 0, *, least: int = 1, priority: int = 0, since: float = 0.0) -> Claim:
    return Claim(run, priority, since, SLOT, least, held, wanted)


def test_a_run_alone_has_no_limit() -> None:
    assert decide(claim("a", 2, 2), [], 0) == Share()


def test_a_run_above_its_least_makes_room_for_one_of_the_same_priority_that_cannot_begin() -> None:
    a, b = claim("a", 4, least=2), claim("b", 0, 4, least=2, since=1.0)
    share = decide(a, [b], 0)
    assert share.limit == 2
    assert share.reason == "run b of the same priority waits for 4 slots and has 0 of the 2 that it needs"
    assert decide(b, [a], 0) == Share(), "who is to get something asks on"


def test_but_not_for_one_that_only_wants_to_grow() -> None:
    assert decide(claim("a", 3), [claim("b", 1, 3)], 0) == Share()


def test_nor_for_one_that_could_not_begin_all_the_same() -> None:
    assert decide(claim("a", 4, least=2), [claim("b", 0, 4, least=3)], 0) == Share()


def test_a_run_of_higher_priority_grows_at_the_cost_of_others_down_to_their_least() -> None:
    low, high = claim("low", 3, least=1), claim("high", 1, 3, priority=1)
    assert decide(low, [high], 0).limit == 1
    assert "run high of priority 1 (this one: 0) waits for 3 slots" in decide(low, [high], 0).reason


def test_no_run_makes_room_for_one_of_lower_priority() -> None:
    assert decide(claim("high", 4, priority=1), [claim("low", 0, 4)], 0) == Share()


def test_of_two_that_hold_half_each_the_later_one_lets_go() -> None:
    first, second = claim("a", 2, 2, least=4), claim("b", 2, 2, least=4, since=1.0)
    assert decide(first, [second], 0) == Share()
    assert decide(second, [first], 0).limit == 0


def test_or_the_one_of_lower_priority() -> None:
    low, high = claim("a", 2, 2, least=4), claim("b", 2, 2, least=4, since=1.0, priority=1)
    assert (decide(low, [high], 0).limit, decide(high, [low], 0)) == (0, Share())


def test_who_has_enough_does_not_race_one_of_higher_priority_for_the_next_place() -> None:
    low, high = claim("low", 1, 3), claim("high", 3, 1, priority=1)
    assert decide(low, [high], 0).limit == 1


def test_a_run_whose_slots_could_not_use_these_places_is_left_out() -> None:
    gpu = Claim("b", 5, 0.0, {"CPU": 1.0, "GPU": 1.0}, 1, 0, 4)
    assert decide(claim("a", 4), [gpu], 0) == Share()


def test_places_that_are_free_are_used_before_anybody_makes_room() -> None:
    assert decide(claim("a", 4, least=2), [claim("b", 0, 2, least=2)], 2) == Share(4, decide_reason())


def decide_reason() -> str:
    return "run b of the same priority waits for 2 slots and has 0 of the 2 that it needs"


def test_a_limit_outlives_its_reason_for_a_while_so_that_what_is_given_reaches_its_run() -> None:
    held = Held().next(Share(2, "b waits for 2"), 100.0)
    assert held.next(Share(), 100.0 + HOLD_S - 0.1).share.limit == 2
    assert held.next(Share(), 100.0 + HOLD_S).share == Share()
    assert held.next(Share(2, "b waits for 1"), 101.0).share.reason == "b waits for 2", "told once"


CLAIMS = st.lists(
    st.builds(
        lambda p, s, least, held, wanted: (p, s, least, held, wanted),
        st.integers(0, 2), st.integers(0, 3), st.integers(1, 4), st.integers(0, 5), st.integers(0, 5),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@given(CLAIMS, st.integers(0, 3))
def test_what_is_dealt_is_there_and_nobody_who_trains_falls_below_its_least(
    raw: list[tuple[int, int, int, int, int]], free: int
) -> None:
    claims = [Claim(f"r{i}", p, s, SLOT, least, held, wanted) for i, (p, s, least, held, wanted) in enumerate(raw)]
    dealt = deal(claims, free)
    assert sum(dealt.values()) <= free + sum(each.held for each in claims)
    for each in claims:
        assert 0 <= dealt[each.run] <= max(each.held + each.wanted, each.held)
        assert each.held < each.least or dealt[each.run] >= each.least


# --- many runs over time ---------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run as the simulation plays it: it asks, is given, and gives back a while after it was asked to."""

    name: str
    priority: int
    since: int
    least: int
    most: int
    held: int = 0
    pending: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    share: Held = field(default_factory=Held)
    settled: bool = False

    def claim(self, now: int) -> Claim:
        wanted = sum(now - asked >= 3 for asked in self.pending)
        return Claim(self.name, self.priority, self.since, SLOT, self.least, self.held, wanted)

    def turn(self, others: list[Claim], free: int, now: int) -> None:
        self.leaving, gone = [at for at in self.leaving if at > now], sum(at <= now for at in self.leaving)
        self.held -= gone
        self.settled = self.settled or self.held >= self.least
        self.share = self.share.next(decide(self.claim(now), others, free), now)
        limit = self.share.share.limit
        may = self.most if limit is None else min(limit, self.most)
        staying = self.held - len(self.leaving)
        if self.held >= self.least:
            # A planned end takes a while.
            self.leaving += [now + 2] * max(0, staying - max(may, self.least))
        else:
            self.held = min(self.held, may)
        asked = max(0, may - (self.held - len(self.leaving)))
        self.pending = (self.pending + [now] * asked)[:asked]


def settle(jobs: list[Job], capacity: int, rng: random.Random, until: int, start: int = 0) -> list[tuple[int, ...]]:
    """Each second: places go to whoever, then each run looks and acts, in any order. What each held, by second."""
    told = []
    for now in range(start, until):
        free = capacity - sum(job.held for job in jobs)
        waiting = [job for job in jobs for _ in job.pending]
        rng.shuffle(waiting)
        for job in waiting[: max(0, free)]:
            job.held += 1
            job.pending.pop(0)
        claims = {job.name: job.claim(now) for job in jobs}
        for job in rng.sample(jobs, len(jobs)):
            free = max(0, capacity - sum(each.held for each in jobs))
            job.turn([claims[each.name] for each in jobs if each is not job], free, now)
            assert not job.settled or job.held >= job.least, f"{job} was stopped"
        assert sum(job.held for job in jobs) <= capacity
        told.append(tuple(job.held for job in jobs))
    return told


JOBS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(raw=JOBS, capacity=st.integers(1, 10), seed=st.integers(0, 1000))
def test_whatever_the_order_all_comes_to_rest_and_nobody_waits_for_what_it_should_have(
    raw: list[tuple[int, int, int, int]], capacity: int, seed: int
) -> None:
    rng = random.Random(seed)
    jobs = [Job(f"r{i}", p, since, least, least + more) for i, (p, since, least, more) in enumerate(raw)]
    begun: list[Job] = []
    now = 0
    for job in sorted(jobs, key=lambda job: job.since):
        settle(begun, capacity, rng, job.since, now) if begun else None
        now = job.since
        begun.append(job)
    told = settle(begun, capacity, rng, now + 160, now)
    assert len(set(told[-40:])) == 1, f"no rest: {told[-40:]}"
    for job in jobs:
        if job.held < job.least:
            assert _could_have(job, jobs, capacity) < job.least, f"{job} could begin: {jobs}"


def _could_have(job: Job, jobs: list[Job], capacity: int) -> int:
    """What is free, what runs that come after it hold in vain, and what those of no higher priority have beyond their
    least."""
    own = job.claim(0).order
    found = job.held + capacity - sum(each.held for each in jobs)
    for other in jobs:
        if other is not job and other.held < other.least and other.claim(0).order > own:
            found += other.held
        elif other is not job and other.held >= other.least and other.priority <= job.priority:
            found += other.held - other.least
    return found

"""Who counts as slower than its peers, on fleets with noise; and what the run does about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import snapshot_id
from elastic.core.data.collectives import CollectiveUse
from elastic.core.policy.stragglers import CollectiveWatch, StragglerWatch, _medians_of_others
from elastic.core.run.phase import Pausing, Training
from elastic.core.settings import StragglerSettings

RANKS, STEP_S, NOISE = 64, 2.0, 0.03
SLOW = 17


def fleet(steps: int, seed: int, slow_from: int | None = None, factor: float = 1.0) -> Iterator[list[float]]:
    """Own times of every rank, step by step; rank SLOW is slower from a step on."""
    rng = np.random.default_rng(seed)
    for begin in range(0, steps, 10_000):
        block = STEP_S * rng.normal(1.0, NOISE, (min(10_000, steps - begin), RANKS))
        if slow_from is not None:
            block[max(0, slow_from - begin) :, SLOW] *= factor
        yield from block.tolist()


def watch(members: int = RANKS, **settings: object) -> StragglerWatch:
    made = StragglerWatch(StragglerSettings(**settings))  # type: ignore[arg-type]
    made.begin(1, [100 + rank for rank in range(members)])
    return made


@pytest.mark.parametrize("rank_hours", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_healthy_fleet_is_left_in_peace(rank_hours: int) -> None:
    steps = round(rank_hours * 3600 / STEP_S / RANKS)
    watching = watch()
    assert [found for own_s in fleet(steps, seed=1) for found in watching.step(1, own_s)] == []


@pytest.mark.parametrize("seed", range(20))
def test_eight_per_cent_are_seen_within_a_few_windows(seed: int) -> None:
    watching, slow_from = watch(), 300 + seed
    seen = ((step, found) for step, own_s in enumerate(fleet(900, seed, slow_from, 1.08)) for found in
            watching.step(1, own_s))  # fmt: skip
    step, first = next(seen)
    assert first.worker == 100 + SLOW
    assert step - slow_from <= 6 * 30, "six minutes of steps of 2 s"
    assert first.factor == pytest.approx(1.08, abs=0.03)
    assert (first.windows, first.confirmed) == (3, False)
    rest = [found for _, found in seen]
    assert rest[0].confirmed
    assert {found.worker for found in (first, *rest)} == {100 + SLOW}


def slow(watching: StragglerWatch, windows: int, *factors: float) -> list[ev.StragglerFound]:
    """Windows without noise."""
    return [found for _ in range(windows * 30) for found in watching.step(1, [2.0 * f for f in factors])]


def test_one_window_more_confirms_it_and_then_it_is_known() -> None:
    watching = watch(3)
    assert slow(watching, 2, 1, 1, 1) == []
    assert slow(watching, 2, 1, 1.2, 1) == []
    found = slow(watching, 10, 1, 1.2, 1)
    assert [(f.worker, f.windows, f.confirmed) for f in found] == [(101, 3, False), (101, 4, True)]
    assert (found[0].own_s, found[0].peers_s, found[0].factor) == (2.4, 2.0, 1.2)


def test_what_is_usual_for_rank_0_goes_with_the_rank() -> None:
    watching = watch(3)
    assert slow(watching, 4, 1.04, 1, 1) == []
    watching.begin(2, [101, 102, 100])
    for factors in ((1.04, 1, 1), (1.04, 1, 1.08)):
        found = [f for _ in range(8 * 30) for f in watching.step(2, [2.0 * factor for factor in factors])]
        assert {f.worker for f in found} == ({100} if factors[2] > 1 else set())


def test_what_its_device_says_of_its_clocks_is_told_with_a_straggler() -> None:
    watching = watch(3)
    slow(watching, 2, 1, 1, 1)
    why = ("power limit: 1900 of 1980 MHz", "temperature: 1200 of 1980 MHz", "")
    found = [each for _ in range(90) for each in watching.step(1, [2.0, 2.4, 2.0], why)]
    assert [(each.worker, each.slowed) for each in found] == [(101, why[1])]


def test_a_window_in_order_begins_the_count_anew() -> None:
    watching = watch(3)
    slow(watching, 2, 1, 1, 1)
    for _ in range(5):
        assert slow(watching, 2, 1, 1.2, 1) == []
        assert slow(watching, 1, 1, 1, 1) == []


def test_a_rank_that_always_has_a_little_more_to_do_is_no_straggler() -> None:
    watching = watch(3)
    assert slow(watching, 20, 1.04, 1, 1) == []
    assert slow(watching, 20, 1.08, 1, 1) == [], "four per cent are usual for it"
    assert [found.worker for found in slow(watching, 3, 1.12, 1, 1)] == [100]


def test_what_begins_much_too_slow_is_not_taken_for_usual() -> None:
    assert [found.worker for found in slow(watch(3), 5, 1.3, 1, 1)] == [100]


def test_a_new_generation_keeps_what_is_known_of_those_that_stay() -> None:
    watching = watch(3)
    slow(watching, 4, 1, 1, 1)
    slow(watching, 2, 1, 1.2, 1)
    watching.begin(2, [100, 101, 200, 201])
    assert watching.step(1, [1.0, 9.0, 1.0, 1.0]) == (), "a late report of the generation before"
    found = [f for _ in range(30) for f in watching.step(2, [2.0, 2.4, 3.0, 2.0])]
    assert [f.worker for f in found] == [101], "the newcomer is measured first"


@pytest.mark.parametrize("own_s", [[2.0], [2.0, 0.0, 2.0], []])
def test_what_cannot_be_compared_is_not(own_s: list[float]) -> None:
    watching = watch(max(1, len(own_s)))
    assert [f for _ in range(300) for f in watching.step(1, own_s)] == []


def test_it_can_be_switched_off_and_set() -> None:
    off = watch(3, policy="off")
    assert slow(off, 20, 1, 3, 1) == []
    quick = watch(3, window_steps=2, windows=1, calibration_windows=1, factor=2.0)
    assert [quick.step(1, [1.0, 1.9, 1.0]) for _ in range(8)] == [()] * 8
    assert [len(quick.step(1, [1.0, 4.2, 1.0])) for _ in range(4)] == [0, 1, 0, 1]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=12))
def test_the_medians_of_the_others(values: list[float]) -> None:
    assert _medians_of_others(values) == [median(values[:i] + values[i + 1 :]) for i in range(len(values))]


# --- what is done ----------------------------------------------------------------------------------------------------


def scenario(policy: str, low: int = 2, memory: bool = True) -> Scenario:
    run = Scenario(low, 3, memory=memory)
    run.state = replace(run.state, settings=replace(run.state.settings, stragglers=StragglerSettings(policy)))  # type: ignore[arg-type]
    return run.started(3)


def found(run: Scenario, worker: int, confirmed: bool = True) -> Scenario:
    event = ev.StragglerFound(run.state.generation, worker, 1.31, 2.62, 2.0, 3 + confirmed, confirmed)
    return run.do(event)


def test_it_is_said_with_figures_and_nothing_else_is_done() -> None:
    run = found(scenario("report"), 1)
    assert isinstance(run.phase, Training)
    (note,) = run.acts(act.Note)
    assert note.kind == "straggler"
    assert note.sentence == (
        "rank 1 on node node-1 needs 1.31 times as long as its peers for its own part of a step "
        "(2.62 s, they 2 s), 4 windows of 30 steps running"
    )
    assert note.data == {"worker": 1, "node": "node-1", "factor": 1.31}


def test_the_others_go_on_from_the_same_step_and_the_node_is_left_alone() -> None:
    run = found(scenario("evict"), 1, confirmed=False)
    assert isinstance(run.phase, Training), "one window more has to confirm it"
    found(run, 1)
    assert isinstance(run.phase, Pausing)
    run.do(*(ev.StopPromised(1, w, 41, memory=True) for w in (0, 1, 2)))
    run.left(41)
    assert run.state.saved.survey is not None
    assert not run.acts(act.ReleaseSlot), "the step lies in its node's memory, too"
    run.do(ev.SnapshotsReported(run.state.saved.survey.number, ((snapshot_id(41, 1), 41),)))
    (begin,) = run.acts(act.BeginGeneration)
    assert (begin.members, begin.checkpoint, begin.step) == ((0, 2), snapshot_id(41, 1), 41)
    run.train()
    (released,) = run.acts(act.ReleaseSlot)
    assert released.slot == 1
    (incident,) = run.acts(act.CloseIncident)
    assert (incident.incident.kind, incident.incident.planned, incident.incident.steps_repeated) == ("resize", True, 0)
    (request,) = run.acts(act.RequestSlot)
    assert request.avoid == ("node-1",), "the node is not asked for again at once"
    assert isinstance(run.phase, Training)
    assert run.state.fleet.evicted == ()


def test_a_run_that_needs_it_keeps_it() -> None:
    run = found(scenario("evict", low=3), 1)
    assert isinstance(run.phase, Training)
    assert "is kept: 2 would be left of at least 3" in run.said()


def _lose_other(run: Scenario) -> None:
    run.lose_node(0)


def _lose_it(run: Scenario) -> None:
    run.lose_node(1)


@pytest.mark.parametrize(("lose", "members"), [(_lose_it, (0, 2)), (_lose_other, (1, 2))])
def test_a_loss_at_the_planned_end(lose: Callable[[Scenario], None], members: tuple[int, ...]) -> None:
    run = found(scenario("evict", memory=False).commit(5), 1)
    lose(run)
    run.left(6)
    (begin,) = run.acts(act.BeginGeneration)
    assert begin.members == members, "with one more gone the run cannot do without the slow one"


def test_nobody_is_evicted_while_the_run_ends() -> None:
    run = scenario("evict")
    run.do(ev.StopRequested("enough"))
    before = run.phase
    assert isinstance(before, Pausing)
    found(run, 1)
    assert run.phase == before


def reduced(seconds: float, calls: int = 4, nbytes: int = 1 << 20) -> tuple[CollectiveUse, ...]:
    """A step's ledger: an all-reduce that takes so long, and a small broadcast."""
    return (
        CollectiveUse("all_reduce", "dp", "float32", calls, nbytes, seconds, seconds),
        CollectiveUse("broadcast", "dp", "float32", 1, 64, 1e-4, 1e-4),
    )


def collectives(*phases: tuple[int, float, float]) -> list[ev.CollectivesSlowed]:
    """Of a generation whose all-reduce takes, for so many steps, so many seconds, give or take 10 %, while the second
    of its ranks computes so many seconds and the others 0.3."""
    rng = np.random.default_rng(3)
    watching = CollectiveWatch(StragglerSettings())
    watching.begin(1)
    found = [
        watching.step(1, reduced(seconds * rng.uniform(0.9, 1.1)), (0.3, own_s, 0.3))
        for steps, seconds, own_s in phases
        for _ in range(steps)
    ]
    return [one for one in found if one is not None]


def test_a_connection_that_becomes_slower_is_found_once() -> None:
    (found,) = collectives((200, 0.1, 0.3), (300, 0.2, 0.3))
    assert found.factor == pytest.approx(2.0, rel=0.05)
    assert found.windows == 3


def test_collectives_as_usual_and_short_disturbances_are_left_in_peace() -> None:
    assert collectives((5000, 0.1, 0.3)) == []
    assert collectives((200, 0.1, 0.3), (60, 0.4, 0.3), (500, 0.1, 0.3)) == []
    assert collectives((200, 0.1, 0.3), (500, 0.13, 0.3)) == []


def test_waiting_for_a_rank_that_computes_longer_is_no_slow_connection() -> None:
    """Nor where it is too little for a straggler, or not yet found to be one."""
    assert collectives((200, 0.1, 0.3), (500, 0.3, 0.5)) == []
    assert collectives((200, 0.1, 0.32), (500, 0.2, 0.42)) == []
    (found,) = collectives((200, 0.1, 0.3), (500, 0.5, 0.5))
    assert found.factor == pytest.approx(3.0, rel=0.1)


def test_a_rank_that_has_always_computed_longer_explains_no_slower_collectives() -> None:
    (found,) = collectives((200, 0.3, 0.5), (500, 0.6, 0.5))
    assert found.factor == pytest.approx(2.0, rel=0.05)


def test_what_moves_more_may_take_longer() -> None:
    watching = CollectiveWatch(StragglerSettings())
    watching.begin(1)
    told = [watching.step(1, reduced(0.1)) for _ in range(60)]
    told += [watching.step(1, reduced(0.4, nbytes=4 << 20)) for _ in range(300)]
    assert told == [None] * 360


def test_every_generation_is_compared_with_its_own_beginning() -> None:
    watching = CollectiveWatch(StragglerSettings())
    for generation, seconds in ((1, 0.1), (2, 0.3)):
        watching.begin(generation)
        assert [watching.step(generation, reduced(seconds)) for _ in range(300)] == [None] * 300
    assert watching.step(1, reduced(9.0)) is None


def test_a_slow_connection_is_told_and_nothing_is_released() -> None:
    run = Scenario(2, 3).started(3).do(ev.CollectivesSlowed(1, 2.0, 0.1, 0.2, 3))
    (told,) = [note for note in run.acts(act.Note) if note.kind == "straggler"]
    assert told.sentence.startswith("collectives take 2.00 times as long as when generation 1 began (0.2 s of a step")
    assert isinstance(run.phase, Training)
    assert run.acts(act.ReleaseSlot) == []

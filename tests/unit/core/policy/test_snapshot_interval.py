"""How often a snapshot is taken: what is measured, and what follows from it on every rank alike."""

from __future__ import annotations

from elastic.core.policy.snapshot_interval import Cadence, Costs


def taken(cadence: Cadence, steps: int, cost_s: float | None, step_s: float, epoch: int = 10**9) -> list[int]:
    found = []
    for step in range(1, steps + 1):
        if cadence.due(step, ends_epoch=step % epoch == 0):
            cadence.agreed(cost_s, step_s)
            cadence.passed(step, taken=True)
            found.append(step)
    return found


def measured(quiet_s: float, busy_s: float, stall_s: float, snapshots: int = 8, span: int = 1) -> Costs:
    """Of each snapshot `span` busy steps, and two quiet ones."""
    costs = Costs()
    for _ in range(snapshots):
        costs.snapshot(stall_s)
        for _ in range(span):
            costs.step(busy_s, busy=True)
        costs.step(quiet_s, busy=False)
        costs.step(quiet_s, busy=False)
    return costs


def test_a_fixed_cadence_is_kept_whatever_it_costs() -> None:
    assert taken(Cadence(5, 0.01), 21, 100.0, 1.0) == [5, 10, 15, 20]
    assert taken(Cadence(1, 0.01), 3, None, 0.0) == [1, 2, 3]


def test_the_first_step_is_due_and_others_follow_soon_until_the_cost_is_known() -> None:
    assert taken(Cadence(None, 0.01), 14, None, 1.0) == [1, 5, 9, 13]


def test_the_cost_stays_under_its_limit() -> None:
    cadence = Cadence(None, 0.01)
    steps = taken(cadence, 1000, 0.2, 1.0)
    assert cadence.interval == 20
    assert len(steps) * 0.2 / 1000 < 0.011


def test_the_last_step_of_an_epoch_is_due_in_the_place_of_a_later_one() -> None:
    assert taken(Cadence(None, 0.01), 200, 0.2, 1.0, epoch=90) == [1, 21, 41, 61, 81, 90, 121, 141, 161, 180]
    short = taken(Cadence(None, 0.01), 1000, 0.2, 1.0, epoch=15)
    assert short[:6] == [1, 15, 30, 45, 75, 90], "not all of them: they are shorter than the interval"
    assert len(short) * 0.2 / 1000 < 0.011
    assert taken(Cadence(5, 0.01), 20, 0.2, 1.0, epoch=7) == [5, 10, 15, 20], "a fixed cadence is kept"


def test_what_costs_nothing_is_done_at_every_step_but_some_to_compare_with() -> None:
    steps = taken(Cadence(None, 0.01), 330, 0.0, 1.0)
    assert 310 < len(steps) < 330


def test_a_lucky_measurement_does_not_buy_a_hundred_snapshots() -> None:
    cadence = Cadence(None, 0.01)
    cadence.agreed(0.8, 1.0)
    assert cadence.interval == 80
    cadence.agreed(0.0, 1.0)
    assert cadence.interval == 40


def test_a_step_that_could_not_be_taken_is_made_up_for_by_the_next() -> None:
    cadence = Cadence(None, 0.01)
    cadence.agreed(0.1, 1.0)
    cadence.passed(1, taken=False)
    assert cadence.due(2)


def test_the_cost_is_the_stall_and_what_the_steps_under_it_take_longer() -> None:
    assert abs((measured(1.0, 1.05, 0.01).cost_s or 0.0) - 0.06) < 1e-9
    assert abs((measured(1.0, 1.05, 0.01, span=3).cost_s or 0.0) - 0.16) < 1e-9
    assert measured(1.0, 0.9, 0.01).cost_s == 0.01, "noise is no gain"
    assert measured(1.0, 1.05, 0.01).step_s == 1.0


def test_nothing_is_known_until_there_is_enough_to_compare() -> None:
    assert Costs().cost_s is None
    assert measured(1.0, 1.05, 0.01, snapshots=2).cost_s is None


def test_new_memory_does_not_count() -> None:
    """Each of the two segments is written for the first time once."""
    costs = Costs()
    for stall_s in (9.0, 9.0, 0.01, 0.01, 0.01):
        costs.snapshot(stall_s)
        costs.step(1.0, busy=True)
        costs.step(1.0, busy=False)
    assert costs.cost_s == 0.01

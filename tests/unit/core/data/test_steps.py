"""The ranks' step reports: joined to completed steps, metrics reduced, and the form that travels with a snapshot."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.collectives import CollectiveUse
from elastic.core.data.step_table import StepTable
from elastic.core.data.steps import RANKS_PER_METRIC, CompletedStep, StepReport, join, shared_out, union
from elastic.core.events import FirstStepDone


def report(generation: int, step: int, rank: int, **more: Any) -> StepReport:
    start = (step * 2 + rank) * 4
    values = {"step": step, "loss": 0.5 * (rank + 1), "positions": ((start, start + 4),), "samples": 4}
    return StepReport(**{**values, "duration_s": 1.0 + rank, "generation": generation, "rank": rank, **more})


def test_a_step_is_complete_when_every_rank_has_reported_it() -> None:
    table = StepTable()
    table.begin(generation=2, world_size=2, start_step=10)
    assert table.add(report(2, 11, 1, tokens=5, grad_norm=2.0, save_stall_s=0.3)) is None
    done = table.add(report(2, 11, 0, tokens=6, grad_norm=2.0, learning_rates=(1e-3,)))
    assert done == CompletedStep(
        2, 11, True, 1.5, ((88, 96),), 8, 2.0, 0.0, 0.3, 11, 2.0, (1e-3,), noncollective_s=(0.0, 0.0)
    )  # fmt: skip
    assert done.first_step_done == FirstStepDone(2, 11)
    table.add(report(2, 12, 0))
    second = table.add(report(2, 12, 1))
    assert second is not None
    assert second.first_step_done is None


def test_a_completed_step_has_the_collectives_of_rank_0() -> None:
    table = StepTable()
    table.begin(1, 2)
    use = CollectiveUse("all_reduce", "dp", "float32", 2, 64, 0.25, 0.125)
    table.add(report(1, 1, 1))
    done = table.add(report(1, 1, 0, collectives=(use,)))
    assert done is not None
    assert done.collectives == (use,)
    assert CollectiveUse.from_json(json.loads(json.dumps(use.to_json()))) == use


def test_parts_of_gradients_are_added_up_where_every_rank_has_them() -> None:
    table = StepTable()
    table.begin(1, 3)
    # A rank whose only pass is padding has measured, too.
    parts = ((2.0, 0.5), (1.0, 0.25), (0.0, 0.0))
    for step, known in ((1, parts), (2, (*parts[:2], ()))):
        done = [table.add(report(1, step, rank, gradient_parts=own)) for rank, own in enumerate(known)][-1]
        assert done is not None
        assert done.gradient_parts == ((3.0, 0.75) if step == 1 else ())


def test_energy_is_that_of_all_ranks_or_of_none_and_flops_are_rank_0s() -> None:
    table = StepTable()
    table.begin(1, 2)
    for step, used in ((1, (2.0, 3.0)), (2, (2.0, 0.0))):
        table.add(report(1, step, 1, energy_j=used[1]))
        done = table.add(report(1, step, 0, energy_j=used[0], sample_flops=7.0))
        assert done is not None
        assert (done.energy_j, done.sample_flops) == (5.0 if step == 1 else 0.0, 7.0)


def test_reports_of_other_generations_ranks_and_done_steps_are_dropped() -> None:
    table = StepTable()
    table.begin(2, 1, start_step=10)
    assert table.add(report(1, 11, 0)) is None
    assert table.add(report(2, 11, 1)) is None
    assert table.add(report(2, 10, 0)) is None
    assert table.add(report(2, 11, 0)) is not None
    assert table.add(report(2, 11, 0)) is None


def test_a_norm_that_is_not_finite_on_one_rank_is_not_finite() -> None:
    table = StepTable()
    table.begin(1, 2)
    table.add(report(1, 1, 0, grad_norm=-1.0))
    done = table.add(report(1, 1, 1, grad_norm=3.0))
    assert done is not None
    assert done.grad_norm == -1.0


def test_the_slowest_rank_is_compared_with_the_median_apart_from_its_data() -> None:
    table = StepTable()
    table.begin(1, 3)
    for rank, (noncollective_s, data_wait_s) in enumerate([(2.0, 0.5), (1.5, 0.0), (1.75, 0.0)]):
        done = table.add(report(1, 1, rank, noncollective_s=noncollective_s, data_wait_s=data_wait_s))
    assert done is not None
    assert (done.noncollective_s, done.straggler_s) == ((2.0, 1.5, 1.75), 0.25)
    for rank, noncollective_s in enumerate([2.0, 0.0, 1.0]):
        done = table.add(report(1, 2, rank, noncollective_s=noncollective_s))
    assert done is not None
    assert done.straggler_s == 0.0, "one rank has not measured it"


def test_a_step_that_was_not_applied_says_why_in_the_words_of_who_knows() -> None:
    table = StepTable()
    table.begin(1, 2)
    table.add(report(1, 1, 0, positions=(), anomaly="the gradient is not finite", skipped=((0, 4),)))
    done = table.add(report(1, 1, 1, positions=(), anomaly="the loss is nan", skipped=((4, 8),)))
    assert done is not None
    assert (done.anomaly, done.positions, done.skipped) == ("the loss is nan", (), ((0, 8),))


def test_positions_that_come_twice_stay_visible() -> None:
    assert join([(4, 8), (0, 4), (2, 6), (9, 9)]) == ((0, 4), (2, 6), (4, 8))
    assert join([(4, 8), (0, 4), (8, 9)]) == ((0, 9),)


def test_a_union_has_every_position_once() -> None:
    assert union([(4, 8), (0, 4), (2, 6), (9, 9), (10, 12), (10, 11)]) == ((0, 8), (10, 12))


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_any_order_and_any_repetition_gives_every_step_once(world: int, steps: int, data: st.DataObject) -> None:
    sent = [(rank, step) for rank in range(world) for step in range(1, steps + 1)]
    again = data.draw(st.lists(st.sampled_from(sent), max_size=10))
    order = data.draw(st.permutations(sent + again))
    table = StepTable()
    table.begin(5, world)
    done = [step for rank, number in order if (step := table.add(report(5, number, rank))) is not None]
    assert sorted(step.step for step in done) == list(range(1, steps + 1))
    assert [step.first for step in done] == [True] + [False] * (steps - 1)
    assert all(step.samples == 4 * world for step in done)


def done_with(*metrics: dict[str, Any]) -> CompletedStep:
    table = StepTable()
    table.begin(1, len(metrics))
    found = [table.add(report(1, 1, rank, metrics=given)) for rank, given in enumerate(metrics)]
    assert found[-1] is not None
    return found[-1]


def test_metrics_of_all_ranks_are_reduced_to_the_mean_over_the_ranks_that_reported() -> None:
    done = done_with({"val_loss": 1.0, "lr": 0.5}, {"val_loss": 2.0, "lr": 0.5}, {"note": "a"}, {"val_loss": 6.0})
    assert done.metrics == {"val_loss": 3.0, "lr": 0.5, "note": "a"}
    assert done.metrics_by_rank == {"val_loss": {0: 1.0, 1: 2.0, 3: 6.0}}


def test_metrics_that_are_not_numbers_are_those_of_the_lowest_rank() -> None:
    done = done_with({}, {"name": "b", "flag": True}, {"name": "c", "flag": False})
    assert done.metrics == {"name": "b", "flag": True}
    assert done.metrics_by_rank == {"name": {1: "b", 2: "c"}, "flag": {1: True, 2: False}}


def test_values_by_rank_are_bounded() -> None:
    ranks = RANKS_PER_METRIC + 9
    done = done_with(*({"x": float(rank)} for rank in range(ranks)))
    assert done.metrics["x"] == (ranks - 1) / 2
    assert list(done.metrics_by_rank["x"]) == list(range(RANKS_PER_METRIC))


def test_a_report_that_travels_with_a_snapshot_is_small_and_complete() -> None:
    whole = report(3, 7, 1, metrics={"x": 1}, anomaly="the loss is nan", skipped=((1, 2),), positions=())
    whole = replace(whole, grad_norm=2.5, gradient_parts=(2.0, 0.5), sample_flops=9.0, audit="agreed")
    whole = replace(whole, learning_rates=(0.5, 0.25), travel="ring", content=9, tokens=7)
    assert StepReport.from_json(json.loads(json.dumps(whole.to_json())), 3, 1) == whole
    left_out = {"data_wait_s", "save_stall_s", "noncollective_s", "energy_j", "slowed", "collectives"}
    place = {"generation", "rank"}
    assert whole.to_json().keys() == {part.name for part in fields(StepReport)} - left_out - place
    assert set(report(3, 7, 1).to_json()) == {"step", "loss", "positions", "samples", "duration_s"}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_step_that_others_have_made_is_shared_out_whole(ranks: int) -> None:
    made = [
        StepReport(4, 0.5 + rank, ((10 * rank, 10 * rank + 10),), 10, 0.1, tokens=rank, metrics={"of": rank})
        for rank in range(3)
    ]
    shared = [shared_out(made, rank, ranks) for rank in range(ranks)]
    assert [report.rank for report in shared] == list(range(ranks))
    assert {report.step for report in shared} == {4}
    assert join(part for report in shared for part in report.positions) == ((0, 30),)
    assert sum(report.loss for report in shared) == sum(report.loss for report in made)
    assert (sum(report.samples for report in shared), sum(report.tokens for report in shared)) == (30, 3)
    assert shared[0].metrics == {"of": 0}

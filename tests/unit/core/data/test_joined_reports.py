"""Reports of several ranks as one: however they are grouped, the completed step is the same."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.collectives import CollectiveUse
from elastic.core.data.joined_reports import JoinedReports, joined, joined_by_step, merged
from elastic.core.data.step_table import StepTable
from elastic.core.data.steps import CompletedStep, StepReport

USE = CollectiveUse("all_reduce", "dp", "float32", 2, 64, 0.25, 0.125)
SECONDS = st.floats(0.0, 10.0)
NUMBERS = st.one_of(st.floats(-1e300, 1e300), st.just(math.nan), st.integers(-9, 9))
VALUES = st.one_of(NUMBERS, st.booleans(), st.sampled_from(["a", "b"]))


def report(rank: int, step: int = 7, **more: Any) -> StepReport:
    start = (step * 100 + rank) * 4
    values: dict[str, Any] = {"loss": 0.1 * rank, "positions": ((start, start + 4),), "samples": 4, "duration_s": 1.0}
    return StepReport(**{"step": step, "generation": 3, "rank": rank, **values, **more})


@st.composite
def reports(draw: st.DrawFn) -> list[StepReport]:
    """Of all ranks of a step, in any order."""
    made = []
    for rank in range(draw(st.integers(1, 9))):
        made.append(report(
            rank,
            loss=draw(SECONDS), duration_s=draw(SECONDS), data_wait_s=draw(SECONDS), save_stall_s=draw(SECONDS),
            noncollective_s=draw(SECONDS), energy_j=draw(SECONDS), tokens=draw(st.integers(0, 99)),
            grad_norm=draw(st.sampled_from([None, -1.0, 0.5, 2.0])), content=draw(st.integers(0, 2**64 - 1)),
            anomaly=draw(st.sampled_from(["", "", "the loss is nan", "the gradient is not finite"])),
            skipped=draw(st.sampled_from([(), ((rank * 10, rank * 10 + 5),)])),
            gradient_parts=draw(st.sampled_from([(), (1.0, 0.1 * rank), (2.0, 0.3)])),
            metrics=draw(st.dictionaries(st.sampled_from(["x", "y"]), VALUES)),
            slowed=draw(st.sampled_from(["", "temperature: 1200 of 1980 MHz"])),
            learning_rates=(0.1 * rank,), collectives=(USE,) if rank == 0 else (), sample_flops=9.0 - rank,
        ))  # fmt: skip
    return draw(st.permutations(made))


def done(groups: Sequence[Sequence[StepReport]]) -> CompletedStep:
    """Groups of one report come as a worker sends them, larger ones as an agent does."""
    table = StepTable()
    table.begin(3, sum(map(len, groups)), start_step=6)
    for group in groups:
        if len(group) == 1:
            found = table.add(group[0])
        else:
            part = pickle.loads(pickle.dumps(joined(group)))  # noqa: S301
            assert table.takes(part)
            found = table.add_joined(part)
    assert found is not None
    return found


@given(reports(), st.data())
def test_any_grouping_gives_the_same_step(sent: list[StepReport], data: st.DataObject) -> None:
    groups: list[list[StepReport]] = [[]]
    for one in sent:
        if groups[-1] and data.draw(st.booleans()):
            groups.append([])
        groups[-1].append(one)
    assert text(done(groups)) == text(done([[one] for one in sorted(sent, key=lambda one: one.rank)]))


@given(reports(), st.data())
def test_what_nodes_have_joined_is_merged_to_what_one_would_have_joined(
    sent: list[StepReport], data: st.DataObject
) -> None:
    groups: dict[int, list[StepReport]] = {}
    for one in sent:
        groups.setdefault(data.draw(st.integers(0, 3)), []).append(one)
    assert repr(sorted_names(merged([joined(group) for group in groups.values()]))) == repr(sorted_names(joined(sent)))


def sorted_names(part: JoinedReports) -> JoinedReports:
    return part._replace(metrics=dict(sorted(part.metrics.items())))


def text(step: CompletedStep) -> str:
    """To be compared: not-a-number is not equal to itself, and the order of names means nothing."""
    by_name = {name: dict(sorted(getattr(step, name).items())) for name in ("metrics", "metrics_by_rank")}
    return repr(replace(step, **by_name))


def test_why_a_device_is_slow_is_known_by_rank() -> None:
    sent = [report(0), report(1, slowed="temperature: 1200 of 1980 MHz"), report(2)]
    assert done([sent[:2], sent[2:]]).slowed == ("", "temperature: 1200 of 1980 MHz", "")
    assert done([[report(0), report(1)]]).slowed == ()


def test_reports_are_joined_step_by_step_and_the_first_of_a_rank_counts() -> None:
    parts = joined_by_step([report(1, 8), report(0, 8), report(0, 7), report(0, 8, loss=9.0)])
    assert [(part.step, part.ranks, part.losses) for part in parts] == [(7, (0,), ()), (8, (0, 1), (0.0, 0.1))]


def test_what_is_joined_is_taken_once_and_never_in_part() -> None:
    table = StepTable()
    table.begin(3, 3, start_step=6)
    pair = joined([report(0), report(1)])
    assert table.add(report(1)) is None
    assert not table.takes(pair), "rank 1 has reported and rank 0 has not"
    assert table.add_joined(pair) is None
    assert table.add(report(0)) is None
    assert table.takes(pair), "both have reported"
    assert table.add_joined(pair) is None
    whole = table.add(report(2))
    assert whole is not None
    assert (whole.samples, whole.loss) == (12, 0.1 + 0.2)
    assert table.takes(pair)
    assert table.add_joined(pair) is None, "the step is complete"
    table.begin(4, 3, start_step=6)
    assert table.takes(pair)
    assert table.add_joined(pair) is None, "its generation is over"


@pytest.mark.parametrize(("values", "mean"), [((1e308, 1.5e308), 1.25e308), ((math.inf, -math.inf), math.nan)])
def test_metrics_that_cannot_be_added_up_do_not_hold_up_the_step(values: tuple[float, float], mean: float) -> None:
    found = done([[report(rank, metrics={"x": value})] for rank, value in enumerate(values)])
    assert repr(found.metrics["x"]) == repr(mean)
    assert found.metrics_by_rank["x"] == dict(enumerate(values))


def test_a_metric_that_every_rank_reports_alike_is_sent_once() -> None:
    part = joined(report(rank, metrics={"same": 0.5, "own": float(rank)}) for rank in (4, 2, 3))
    assert part.metrics["same"].values == (0.5,)
    assert list(part.metrics["own"].pairs()) == [(2, 2.0), (3, 3.0), (4, 4.0)]
    assert part.metrics["own"].ranks is part.ranks, "a message has them once"

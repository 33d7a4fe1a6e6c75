"""Copies of shards (`fsdp2: {shard_workers: N}`, torch's HSDP): what travels, copies that drift apart, what is refused.

That runs through other numbers of copies equal the undisturbed one is in test_oracle.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from test_oracle import BATCH

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

TWO: dict[str, Any] = {"engine": "fsdp2", "fsdp2": {"shard_workers": 2}}
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "engine": "fsdp2"}


def test_weights_travel_within_a_group_and_sums_of_gradients_between_groups(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(range(4), "train", {**TWO, "url": str(tmp_path)}, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    rows = {(use.op, use.axis): use for use in outcomes[0].reports[-1].collectives}
    assert {key for key, use in rows.items() if use.bytes > 8} == {
        ("all_gather_into_tensor", "dp_shard"), ("reduce_scatter_tensor", "dp_shard"), ("all_reduce", "dp_replicate"),
    }  # fmt: skip
    assert rows["all_reduce", "dp_replicate"].bytes * 2 == rows["reduce_scatter_tensor", "dp_shard"].bytes
    told = [report.travel for report in outcomes[0].reports if report.travel]
    assert told == ["shards over 2 workers, sums over 2 copies of each"]


def test_a_world_of_other_than_whole_groups_is_one_group_and_says_so(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(range(3), "train", {**TWO, "url": str(tmp_path)}, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    told = [report.travel for report in outcomes[0].reports if report.travel]
    assert told == ["shards over all workers: 3 are not several whole groups of 2 (fsdp2.shard_workers)"]


@pytest.mark.parametrize(("what", "victim"), [("master/first.weight", 3), ("exp_avg/second.weight", 2)])
def test_copies_of_a_shard_that_drift_apart_are_told_on_all_ranks(
    crew: Crew, tmp_path: Path, what: str, victim: int
) -> None:
    config = {**TWO, "drifts after": 1, "drifts": what, "victim": victim, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "hybrid.train", config, end_at=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    for rank, outcome in enumerate(outcomes):
        if rank % 2 == victim % 2:
            assert f"{what} on rank {victim} differs" in outcome.result.message
        else:
            assert f"the ranks with shard coordinate {victim % 2}" in outcome.result.message
    assert not CheckpointStore(str(tmp_path), "run").list()


@pytest.mark.parametrize(
    ("config", "mesh", "sentence"),
    [
        ({"fsdp2": {"shard_workers": 1}}, {}, "shard_workers must be a whole number of workers, at least 2, got 1"),
        (TWO, {"tp": 2}, "fsdp2: shard_workers is not supported with mesh: {tp: 2}; leave one"),
    ],
)
def test_what_cannot_be_done_is_refused(
    crew: Crew, tmp_path: Path, config: dict[str, Any], mesh: dict[str, int], sentence: str
) -> None:
    for outcome in crew.run(range(4), "train", {**config, "engine": "fsdp2", "url": str(tmp_path)}, **MORE, **mesh):
        assert outcome.result.kind == "usage_error"
        assert sentence in outcome.result.message

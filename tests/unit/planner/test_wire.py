"""What a rank sends, by operation, and the advice."""

from __future__ import annotations

import pytest

from elastic.core.data.collectives import CollectiveUse
from elastic.planner.wire import advice, group_size, sent_bytes


def use(op: str, size: int = 1_000_000, axis: str = "dp") -> CollectiveUse:
    return CollectiveUse(op, axis, "float32", 1, size, 0.0, 0.0)


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        ("all_reduce", 1_500_000),
        ("all_gather_into_tensor", 750_000),
        ("reduce_scatter_tensor", 750_000),
        ("all_to_all_single", 750_000),
        ("reduce", 750_000),
        ("send", 1_000_000),
    ],
)
def test_sent_bytes_of_four_ranks(op: str, sent: float) -> None:
    assert sent_bytes(use(op), 4) == sent


def test_group_size() -> None:
    assert [group_size(use("all_reduce", axis=axis), 8) for axis in ("dp", "world", "2 ranks")] == [8, 8, 2]


def test_advice_where_gradients_are_reduced_to_all_and_kept_by_one() -> None:
    (sentence,) = advice([use("all_reduce"), use("all_gather_into_tensor")], 4)
    assert "use_multi_rank_bucket_allreduce" in sentence
    assert "sends 0.8 MB less" in sentence


@pytest.mark.parametrize(
    ("ops", "world_size"),
    [
        (["all_reduce"], 4),  # stage 0
        (["reduce", "all_gather_into_tensor"], 4),  # the flag is off
        (["reduce_scatter_tensor", "all_gather_into_tensor"], 4),  # stage 3
        (["all_reduce", "all_gather_into_tensor"], 1),
    ],
)
def test_no_advice(ops: list[str], world_size: int) -> None:
    # Norms and overflow flags are no gradients.
    assert advice([*map(use, ops), use("all_reduce", 8)], world_size) == []

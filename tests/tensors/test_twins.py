"""Ranks with the same shard as each other's replicas: when they are, which of them write, whose reports each has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_memory_tier import Rank

from elastic.comm.lanes import Lanes
from elastic.core.checkpoint.snapshots import steps_of
from elastic.training.saving import memory_tier, twins
from elastic.training.saving.twins import Twins


class Ranks:
    """An agreement of ranks of which this one asks; `others` say the same as it does, but for what is given."""

    def __init__(self, rank: int, ranks: Sequence[int], nodes: Sequence[str] = ()) -> None:
        self.rank, self.ranks, self.world_size = list(ranks).index(rank), ranks, len(ranks)
        self.nodes = nodes
        self.texts: list[bytes] = []

    def by_rank(self, values: Sequence[int]) -> list[list[int]]:
        if self.texts:
            return [[len(text)] for text in self.texts]
        return [[twins.crc32(node.encode())] for node in self.nodes]

    def gathered(self, row: torch.Tensor) -> list[torch.Tensor]:
        assert len(row) == max(map(len, self.texts))
        assert bytes(row.tolist()).rstrip(b"\0") == self.texts[self.rank]
        return [torch.tensor(list(text.ljust(len(row), b"\0")), dtype=torch.uint8) for text in self.texts]


class Every:
    def __init__(self, rank: int, buffers_differ: bool, all_alone: bool, all_apart: bool) -> None:
        self.rank, self.world_size = rank, 8
        self._said = buffers_differ, all_alone, all_apart

    def least(self, values: Sequence[int]) -> list[int]:
        everywhere, other, low, high, alone, apart = values
        differ, all_alone, all_apart = self._said
        return [everywhere, other, low - differ, high, alone and all_alone, apart and all_apart]


def found(
    rank: int,
    nodes: str,
    alone: bool = True,
    differ: bool = False,
    all_alone: bool = True,
    all_apart: bool = True,
    cell: int = 1,
) -> Twins | None:
    """Of eight ranks as four copies of two shards, on these nodes."""
    ranks = list(range(rank % 2, 8, 2))
    copies = Ranks(rank, ranks, [nodes[each] for each in ranks])
    every: Any = Every(rank, differ, all_alone, all_apart)
    state: Any = SimpleNamespace(
        agreement=every,
        lanes=Lanes(every, every),
        copies=SimpleNamespace(own=copies),
        sharded=None,
        modules=dict,
    )
    return Twins.of(state, nodes[rank], alone, cell)


@pytest.fixture(autouse=True)
def without_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins.Inventory, "of", lambda sharded: SimpleNamespace(extras=()))


@pytest.mark.parametrize(("nodes", "writers"), [("aabbccdd", [*range(8)]), ("aaaabbbb", [0, 1, 4, 5])])
def test_of_a_node_one_rank_writes_each_shard(nodes: str, writers: list[int]) -> None:
    pairs = [found(rank, nodes) for rank in range(8)]
    assert [(pair.shard, pair.shards) for pair in pairs if pair] == [(0, 2), (1, 2)] * 4
    assert [rank for rank, pair in enumerate(pairs) if pair and pair.writes] == writers


@pytest.mark.parametrize(
    "why",
    [
        *({"alone": False}, {"differ": True}, {"all_alone": False}, {"all_apart": False}, {"nodes": "aaaaaaaa"}),
        {"cell": 4},
    ],
    ids=["replicas", "buffers", "replicas of another rank", "others on one node", "one node", "half of a cell"],
)
def test_otherwise_each_writes_its_part(why: dict[str, Any]) -> None:
    assert found(3, **{"nodes": "aabbccdd", **why}) is None


def test_each_has_the_reports_of_all() -> None:
    own, other = [{"step": 3, "note": "\u00e4"}], [{"step": 3}, {"step": 4, "loss": 0.5}]
    copies = Ranks(6, [2, 6])
    copies.texts = [json.dumps(other).encode(), json.dumps(own).encode()]
    pair: Any = Twins(copies, 2, 4, True)  # type: ignore[arg-type]
    assert pair.reports(own) == {"2": other, "6": own}


def test_reports_of_lost_ranks_are_those_that_their_copies_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = with_copies(monkeypatch, Pair(writes=True))
    rank.step()
    (extra,) = rank.node.extras
    assert steps_of([extra, None, {}]) == (2, {0: [{"step": 1}], 1: [{"step": 1}]})


def test_a_rank_whose_shard_another_of_its_node_writes_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = with_copies(monkeypatch, Pair(writes=False))
    for _ in range(3):
        rank.step()
    assert (rank.node.committed, rank.node.settled_steps, rank.lost) == ([], [], [])
    assert rank.told == 3, "the others wait for its reports"


def test_snapshots_end_where_buffers_begin_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = with_copies(monkeypatch, Pair(writes=True), Pair(writes=True), None)
    for _ in range(4):
        rank.step()
    assert rank.node.committed == [1, 2]
    assert rank.lost == ["module buffers of the ranks differ now, and only those of rank 0 are the run's"]


class Pair(SimpleNamespace):
    """As `Twins`, of this rank and one other."""

    shard, shards = 0, 1

    def reports(self, own: list[Any]) -> dict[str, Any]:
        self.rank.told += 1
        return {str(rank): [{"step": self.rank.scope.step}] for rank in range(2)}


def with_copies(monkeypatch: pytest.MonkeyPatch, *found: Pair | None) -> Any:
    """A rank with copies of its shard; `found` at its snapshots, the last one at all later ones."""
    rank: Any = Rank()
    rank.told, rank.state.sharded.writers, left = 0, (0,), list(found)
    rank.node.extras, commit = list[Any](), rank.node.commit

    def noted(step: int, extra: Any) -> None:
        rank.node.extras.append(extra)
        commit(step, extra)

    def next_found(*_: Any) -> Pair | None:
        pair = left.pop(0) if len(left) > 1 else left[0]
        if pair is not None:
            pair.rank = rank
        return pair

    rank.node.commit = noted
    monkeypatch.setattr(memory_tier.Twins, "of", next_found)
    return rank

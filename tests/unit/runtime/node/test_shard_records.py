"""Records of a node's shards, which take their time: who asks again gets those that are being made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import StorageError
from elastic.runtime.node.shard_records import ShardRecords
from elastic.transport.handshake import Address

LIMIT_S = 20.0
OWN, PARITY = Held(1, 8, 0, 3, False), Held(1, 8, 1, 3, True, stripe=(1, 2))
OTHERS: dict[int, Address] = {2: ("10.0.0.1", 7)}


class Shards:
    """`go_on` lets it finish; `fails` so often."""

    def __init__(self, fails: int = 0) -> None:
        self.go_on = threading.Event()
        self.done: list[Any] = []
        self._fails = fails

    def rebuild(self, held: Held, others: Mapping[int, Address]) -> Held:
        self.done.append(("rebuild", held.rank, dict(others)))
        if self._fails:
            self._fails -= 1
            raise StorageError("rank 2 cannot be read")
        return Held(held.generation, held.step, held.rank, held.world_size, True)

    def record(self, held: Held) -> Any:
        assert self.go_on.wait(LIMIT_S)
        self.done.append(("record", held.rank))
        return held

    def worked_bytes(self) -> int:
        return 17 + len(self.done)


def test_who_asks_again_gets_what_is_being_made_and_it_is_made_once() -> None:
    shards = Shards()
    wanted = (OWN, PARITY), OTHERS

    async def scenario() -> None:
        records = ShardRecords(shards)
        assert await records.of(wanted, 0.0) in (17, 18)
        shards.go_on.set()
        for _ in range(2):
            told = await records.of(wanted, LIMIT_S)
            assert told == [OWN, Held(1, 8, 1, 3, True)]

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert sorted(shards.done, key=repr) == [("rebuild", 1, OTHERS), ("record", 0), ("record", 1)]


def test_what_has_failed_or_is_other_than_before_is_made_anew() -> None:
    shards = Shards(fails=1)
    shards.go_on.set()

    async def scenario() -> None:
        records = ShardRecords(shards)
        with pytest.raises(StorageError, match="rank 2"):
            await records.of(((PARITY,), OTHERS), LIMIT_S)
        for rank_2_at in (OTHERS, {2: ("10.0.0.2", 7)}):
            assert isinstance(await records.of(((PARITY,), rank_2_at), LIMIT_S), list)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert [done[0] for done in shards.done] == ["rebuild", "rebuild", "record", "rebuild", "record"]

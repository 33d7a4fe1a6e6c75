"""The records of a node's shards, for the manifest of a snapshot: asked for until they are there.

Their digests are computed from the shards' bytes, and lost shards are rebuilt of parity first, which may take a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.snapshots import Held
from elastic.transport.handshake import Address

# Shards of this node, and by rank where the others of their stripes are.
Wanted = tuple[tuple[Held, ...], dict[int, Address]]


class Shards(Protocol):
    """See `SnapshotServer`."""

    def rebuild(self, held: Held, others: Mapping[int, Address]) -> Held: ...

    def record(self, held: Held) -> ShardRecord: ...

    def worked_bytes(self) -> int: ...


class ShardRecords:
    """The records of one node. They are made once for the same shards, however often somebody asks."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._work: tuple[Wanted, asyncio.Task[list[ShardRecord]]] | None = None

    async def of(self, wanted: Wanted, wait_s: float) -> list[ShardRecord] | int:
        """Where they are not there after `wait_s`, a counter that grows while they are being made. Raises
        IntegrityError, or StorageError where another node's shard cannot be read."""
        if self._work is None or self._work[0] != wanted or _failed(self._work[1]):
            making = asyncio.ensure_future(self._made(*wanted))
            # Nobody may come back for it: asyncio would log its error as never retrieved.
            making.add_done_callback(_failed)
            self._work = wanted, making
        task = self._work[1]
        await asyncio.wait((task,), timeout=wait_s)
        return task.result() if task.done() else self._shards.worked_bytes()

    async def _made(self, held: tuple[Held, ...], others: Mapping[int, Address]) -> list[ShardRecord]:
        return await asyncio.gather(*(self._record(one, others) for one in held))

    async def _record(self, held: Held, others: Mapping[int, Address]) -> ShardRecord:
        """A shard that is here only as parity is rebuilt of the other shards of its stripe; then it is a replica."""
        if held.stripe:
            held = await asyncio.to_thread(self._shards.rebuild, held, {rank: others[rank] for rank in held.others})
        return await asyncio.to_thread(self._shards.record, held)


def _failed(task: asyncio.Task[list[ShardRecord]]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)

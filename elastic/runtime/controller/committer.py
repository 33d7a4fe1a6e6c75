"""Makes checkpoints of shards: once every rank of a generation has reported its shard, the manifest is written. No
other module writes manifests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.errors import ElasticError, IntegrityError, StorageError, UsageError
from elastic.core.names import CheckpointRef
from elastic.core.policy.retention import to_delete
from elastic.core.settings import RunSettings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Whole:
    """All shards of one checkpoint are in storage. `protect` is the checkpoint in use; `began` when the first shard was
    reported."""

    ref: CheckpointRef
    shards: tuple[ShardRecord, ...]
    protect: str | None
    began: float
    whole: float


class Committer:
    """`emit` gets CheckpointCommitted and SaveFailing; `record(id, step, bytes, seconds)` is told of each commit, and
    `left_out` of each whole checkpoint that another takes the place of ("step", "generation", "world_size", "by").

    One commit at a time, and the newest wins: a checkpoint that is whole while an older one still waits for storage
    takes its place. Calls of storage run on one thread of the committer's own: a storage that hangs delays nothing but
    commits.
    """

    def __init__(
        self,
        settings: RunSettings,
        store: CheckpointStore,
        versions: Mapping[str, str],
        emit: Callable[[ev.Event], None],
        record: Callable[[str, int, int, float], None],
        left_out: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._versions = versions
        self._emit = emit
        self._record = record
        self._left_out = left_out
        self._thread = ThreadPoolExecutor(1, "elastic-commits")
        self._shards: dict[CheckpointRef, dict[int, ShardRecord]] = {}
        self._began: dict[CheckpointRef, float] = {}
        # The newest checkpoint that is whole; shards of it and of older ones change nothing any more.
        self._newest: CheckpointRef | None = None
        self._next: _Whole | None = None
        self._overtaken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, shard: ShardRecord, protect: str | None, newest_step: int) -> None:
        """A shard of the running generation (the caller has fenced it). `protect` is the checkpoint in use.

        Shards up to `newest_step` (complete already) come again after a restart of the controller and are dropped.
        """
        ref = CheckpointRef(shard.generation, shard.step)
        if shard.step <= newest_step or (self._newest is not None and ref <= self._newest):
            return
        self._forget(lambda other: other.generation < ref.generation)
        shards = self._shards.setdefault(ref, {})
        self._began.setdefault(ref, time.monotonic())
        shards[shard.rank] = shard
        if len(shards) == shard.world_size:
            self._whole(ref, protect)

    def _whole(self, ref: CheckpointRef, protect: str | None) -> None:
        shards = tuple(self._shards[ref].values())
        if self._next is not None:
            self._say_overtaken(self._next, ref)
        self._next = _Whole(ref, shards, protect, self._began[ref], time.time())
        self._newest = ref
        # A rank writes one checkpoint after the other: of older ones no more shards will come.
        self._forget(lambda other: other <= ref)
        self._overtaken.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._commits())

    def _forget(self, over: Callable[[CheckpointRef], bool]) -> None:
        for ref in [ref for ref in self._shards if over(ref)]:
            del self._shards[ref], self._began[ref]

    async def close(self, timeout_s: float) -> None:
        """Wait for the commit under way, then remove what will never become a checkpoint. Bounded."""
        deadline = time.monotonic() + timeout_s
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=timeout_s)
        tidied = asyncio.ensure_future(self._call(self._tidy))
        # At least a moment: a commit in time leaves the thread free.
        await asyncio.wait((tidied,), timeout=max(1.0, deadline - time.monotonic()))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _tidy(self) -> None:
        try:
            for ref in self._store.incomplete():
                self._store.abandon(ref.id)
        except ElasticError as error:
            logger.warning("unfinished checkpoints could not be removed: %s", error)

    async def _commits(self) -> None:
        while self._next is not None:
            whole, self._next = self._next, None
            self._overtaken.clear()
            await self._commit(whole)

    async def _commit(self, whole: _Whole) -> None:
        """Try until it is committed, cannot be, or is overtaken."""
        failures, limits, step = 0, self._settings.failures, whole.ref.step
        while True:
            try:
                manifest = await self._call(self._write, whole.shards, whole.whole)
                break
            except (StorageError, UsageError) as error:  # credentials and rights are mended, too
                retry_s = min(limits.storage_backoff_s * 2.0 ** min(failures, 30), limits.storage_backoff_limit_s)
                failures += 1
                self._emit(ev.SaveFailing(step, str(error), retry_s))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._overtaken.wait(), retry_s)
                if self._next is not None:
                    self._say_overtaken(whole, self._next.ref)
                    return
            except ElasticError as error:
                logger.error("checkpoint %s was not made: %s", whole.ref.id, error)
                self._emit(ev.SaveFailing(step, f"{whole.ref.id} was not made: {error}", 0.0))
                return
        size = sum(shard.bytes for shard in whole.shards)
        self._record(whole.ref.id, manifest.step, size, time.monotonic() - whole.began)
        self._emit(ev.CheckpointCommitted(whole.ref.id, manifest.step, manifest.generation))
        await self._call(self._retire, whole.ref, {whole.ref.id, whole.protect or whole.ref.id})

    def _say_overtaken(self, whole: _Whole, by: CheckpointRef) -> None:
        logger.warning("checkpoint %s is not made: that of step %d takes its place", whole.ref.id, by.step)
        place = {"step": whole.ref.step, "generation": whole.ref.generation, "world_size": len(whole.shards)}
        self._left_out({**place, "by": by.step})

    def _write(self, shards: Sequence[ShardRecord], written_at: float) -> Manifest:
        # The same bytes at every try: one whose answer was lost may have written them already.
        manifest = assemble(shards, run_id=self._settings.run_id, versions=self._versions, written_at=written_at)
        try:
            self._store.commit(manifest)
        except IntegrityError:
            there = self._there(manifest)
            if there is None:
                raise
            return there
        return manifest

    def _there(self, manifest: Manifest) -> Manifest | None:
        """The same checkpoint, if it is complete: the previous controller may have ended before it could say so."""
        try:
            found = self._store.manifest(manifest.id)
        except IntegrityError:
            return None
        files, wanted = (
            [(shard.file, shard.bytes, shard.xxh3) for shard in known.shards] for known in (found, manifest)
        )
        return found if files == wanted else None

    def _retire(self, done: CheckpointRef, protect: set[str]) -> None:
        """Delete what the retention rules do not keep, and what was left unfinished before `done`: a rank writes one
        checkpoint after the other, so no rank writes there any more. While a rank cannot reach storage, each save
        leaves such a folder.

        A failure costs space, not safety: the next save tries again.
        """
        rules = self._settings.checkpoint
        try:
            for ref in to_delete(self._store.list(), rules.keep_last, rules.keep_every_steps, protect):
                self._store.delete(ref.id)
            for ref in self._store.incomplete():
                if ref < done:
                    self._store.abandon(ref.id)
        except ElasticError as error:
            logger.warning("old checkpoints could not be deleted: %s", error)

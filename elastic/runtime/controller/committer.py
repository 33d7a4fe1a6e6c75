"""Makes checkpoints of shards: when every rank of a generation has reported, the manifest is written, only here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.errors import ElasticError, IntegrityError, StorageError, UsageError
from elastic.core.names import CheckpointRef, checkpoint_id
from elastic.core.policy.retention import to_delete
from elastic.core.settings import RunSettings

logger = logging.getLogger(__name__)


class Committer:
    """`emit` gets CheckpointCommitted and SaveFailing; `record(id, step, bytes, seconds)` is told of each commit."""

    def __init__(
        self,
        settings: RunSettings,
        store: CheckpointStore,
        versions: Mapping[str, str],
        emit: Callable[[ev.Event], None],
        record: Callable[[str, int, int, float], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._versions = versions
        self._emit = emit
        self._record = record
        self._shards: dict[str, dict[int, ShardRecord]] = {}
        self._first_shard: dict[str, float] = {}
        self._committed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, shard: ShardRecord, protect: str | None, newest_step: int) -> None:
        """A shard of the running generation (the caller has fenced it). `protect` is the checkpoint in use.

        Shards up to `newest_step` (complete already) come again after a restart of the controller and are dropped.
        """
        name = checkpoint_id(shard.step, shard.generation)
        if name in self._committed or shard.step <= newest_step:
            return
        self._forget(lambda part: part.generation < shard.generation)
        shards = self._shards.setdefault(name, {})
        self._first_shard.setdefault(name, time.time())
        shards[shard.rank] = shard
        if len(shards) == shard.world_size:
            self._committed.add(name)
            task = asyncio.get_running_loop().create_task(self._commit(name, protect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _forget(self, overtaken: Callable[[ShardRecord], bool]) -> None:
        """What a generation that is over, or a newer checkpoint, has left unfinished stays so."""
        for name, shards in tuple(self._shards.items()):
            part = next(iter(shards.values()))
            if overtaken(part) and len(shards) < part.world_size:
                del self._shards[name], self._first_shard[name]

    async def close(self, timeout_s: float) -> None:
        """Wait for commits under way, then remove what will never become a checkpoint."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        try:
            for ref in self._store.incomplete():
                self._store.abandon(ref.id)
        except ElasticError as error:
            logger.warning("unfinished checkpoints could not be removed: %s", error)

    async def _commit(self, name: str, protect: str | None) -> None:
        shards, written_at = list(self._shards.pop(name).values()), time.time()
        failures, limits = 0, self._settings.failures
        while True:
            try:
                manifest = await asyncio.to_thread(self._write, shards, written_at)
                break
            except (StorageError, UsageError) as error:  # credentials and rights are mended, too
                retry_s = min(limits.storage_backoff_s * 2.0 ** min(failures, 30), limits.storage_backoff_limit_s)
                failures += 1
                self._emit(ev.SaveFailing(shards[0].step, str(error), retry_s))
                await asyncio.sleep(retry_s)
            except ElasticError as error:
                logger.error("checkpoint %s was not made: %s", name, error)
                self._emit(ev.SaveFailing(shards[0].step, f"{name} was not made: {error}", 0.0))
                return
        size = sum(shard.bytes for shard in shards)
        seconds = time.time() - self._first_shard.pop(name, time.time())
        self._record(name, manifest.step, size, seconds)
        self._emit(ev.CheckpointCommitted(name, manifest.step, manifest.generation))
        done = CheckpointRef(manifest.generation, manifest.step)
        self._forget(lambda part: CheckpointRef(part.generation, part.step) < done)
        await asyncio.to_thread(self._retire, done, {name, protect or name})

    def _write(self, shards: list[ShardRecord], written_at: float) -> Manifest:
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
        """The same checkpoint, if it is complete: by the controller before this one, which did not live to say so."""
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
        checkpoint after the other, so all are past it. While one cannot reach storage, every save leaves such a folder.

        A failure costs space, not safety: the next save tries again.
        """
        rules = self._settings.checkpoint
        try:
            for ref in to_delete(self._store.list(), rules.keep_last, rules.keep_every_steps, protect):
                self._store.delete(ref.id)
            for ref in self._store.incomplete():
                # All shards of one that was assembled are there: its manifest may be on its way.
                if ref < done and ref.id not in self._committed:
                    self._store.abandon(ref.id)
        except ElasticError as error:
            logger.warning("old checkpoints could not be deleted: %s", error)

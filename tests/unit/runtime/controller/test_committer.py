"""The committer: one commit at a time, the newest wins, and nothing else waits for a storage that hangs."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from elastic.core import events as ev
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import StorageError
from elastic.core.names import CheckpointRef, parse_checkpoint_id
from elastic.core.settings import FailureSettings, RunSettings
from elastic.runtime.controller.committer import Committer
from elastic.runtime.controller.progress import left_out_record

LIMIT_S = 20.0
SETTINGS = RunSettings("run")


async def committer_done(committer: Committer) -> None:
    assert committer._task is not None
    await asyncio.wait_for(asyncio.shield(committer._task), LIMIT_S)


class Nothing:
    """Of a checkpoint store what the committer needs while nothing is complete."""

    def incomplete(self) -> list[Any]:
        return []


def test_what_a_generation_has_left_unfinished_is_not_kept_for_ever() -> None:
    store: Any = Nothing()
    committer = Committer(SETTINGS, store, {}, lambda event: None, lambda *_: None, lambda _: None)

    def shard(generation: int, step: int) -> ShardRecord:
        return ShardRecord(0, 2, generation, step, "f", 0, "", (), (), {})

    old = shard(1, 4)
    gone = weakref.ref(old)
    committer.add(old, None, -1)
    del old
    assert gone() is not None
    committer.add(shard(2, 6), None, -1)
    assert gone() is None


class Folders(Nothing):
    """The folders in storage, by id, and those that were complete."""

    def __init__(self, *ids: str) -> None:
        self.ids, self.complete = set(ids), set[str]()

    def incomplete(self) -> list[CheckpointRef]:
        return [parse_checkpoint_id(name) for name in sorted(self.ids - self.complete)]

    def list(self) -> list[CheckpointRef]:
        return [parse_checkpoint_id(name) for name in sorted(self.complete)]

    def commit(self, manifest: Any) -> None:
        self.complete.add(manifest.id)

    def abandon(self, name: str) -> None:
        self.ids.remove(name)


def test_what_a_newer_checkpoint_has_overtaken_goes_with_it() -> None:
    """While one rank cannot reach storage the others leave a folder for every save."""
    newer = "step-00000020-g0002"
    store: Any = Folders("step-00000009-g0001", "step-00000008-g0002", newer, "step-00000024-g0002")
    kept: list[weakref.ref[ShardRecord]] = []

    def shard(rank: int, step: int) -> ShardRecord:
        made = ShardRecord(rank, 2, 2, step, f"rank-{rank}", 0, "", (), (), {}, parameters={})
        kept.append(weakref.ref(made))
        return made

    committer = Committer(SETTINGS, store, {}, lambda event: None, lambda *_: None, lambda _: None)

    async def scenario() -> None:
        committer.add(shard(0, 8), None, -1)
        committer.add(shard(0, 20), None, -1)
        committer.add(shard(1, 20), None, -1)
        await committer_done(committer)
        committer.add(shard(1, 8), None, 20)

    asyncio.run(scenario())
    assert store.ids == {newer, "step-00000024-g0002"}
    assert store.complete == {newer}
    assert [reference() for reference in kept] == [None] * 4


class Hanging(Folders):
    """Each commit enters, then waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.tried: list[int] = []

    def commit(self, manifest: Any) -> None:
        self.tried.append(manifest.step)
        self.entered.release()
        assert self.go.acquire(timeout=LIMIT_S)
        super().commit(manifest)


def whole(step: int) -> ShardRecord:
    return ShardRecord(0, 1, 1, step, "f", 0, "", (), (), {}, parameters={})


def test_the_newest_whole_checkpoint_takes_the_place_of_those_that_wait() -> None:
    store: Any = Hanging()
    told: list[ev.Event] = []
    left_out: list[Mapping[str, Any]] = []

    async def scenario() -> None:
        # Whatever else the loop's own threads do, a commit that hangs must not take one of them.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        committer = Committer(SETTINGS, store, {}, told.append, lambda *_: None, left_out.append)
        for step in range(1, 41):
            committer.add(whole(step), None, -1)
            if step == 1:
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.to_thread(store.entered.acquire), LIMIT_S)
        store.go.release()
        store.go.release()
        await committer_done(committer)
        await committer.close(LIMIT_S)

    asyncio.run(scenario())
    assert store.tried == [1, 40]
    assert [event.step for event in told if isinstance(event, ev.CheckpointCommitted)] == [1, 40]
    assert [one["step"] for one in left_out] == list(range(2, 40))
    # Storage works: it is not told to fail.
    assert not [event for event in told if isinstance(event, ev.SaveFailing)]
    assert left_out_record(left_out[0])["sentence"] == (
        "the checkpoint of step 2 is left out: storage is slower than the cadence, and that of step 3 takes its place"
    )


def test_a_commit_that_waits_for_its_next_try_gives_way_at_once() -> None:
    class Failing(Folders):
        def commit(self, manifest: Any) -> None:
            if manifest.step == 1:
                raise StorageError("away")
            super().commit(manifest)

    store: Any = Failing()
    told: list[ev.Event] = []
    left_out: list[Mapping[str, Any]] = []

    async def scenario() -> None:
        failures = FailureSettings(storage_backoff_s=1e6, storage_backoff_limit_s=1e6)
        committer = Committer(
            replace(SETTINGS, failures=failures), store, {}, told.append, lambda *_: None, left_out.append
        )
        committer.add(whole(1), None, -1)
        while not told:
            await asyncio.sleep(0.001)
        committer.add(whole(2), None, -1)
        await committer_done(committer)

    asyncio.run(scenario())
    assert store.complete == {"step-00000002-g0001"}
    assert [type(event) for event in told] == [ev.SaveFailing, ev.CheckpointCommitted]
    assert [(one["step"], one["by"]) for one in left_out] == [(1, 2)]

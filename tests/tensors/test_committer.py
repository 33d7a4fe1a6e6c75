"""Manifests are written once, whoever writes them: a controller that comes back finds what the one before has made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from checkpoint_samples import snapshots, state, written

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.settings import RunSettings
from elastic.runtime.controller.committer import Committer

LIMIT_S = 20.0


def test_a_checkpoint_that_was_made_and_not_told_is_told_by_the_next_controller(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), "run")
    shards = [store.write_shard(part) for part in snapshots(written("zero12", 2), state(), generation=1, step=4)]

    async def made() -> list[ev.Event]:
        told: list[ev.Event] = []
        committer = Committer(RunSettings("run"), store, {}, told.append, lambda *_: None)
        for shard in shards:
            committer.add(shard, None, -1)
        await committer.close(LIMIT_S)
        return told

    first = asyncio.run(made())
    assert [type(event) for event in first] == [ev.CheckpointCommitted]
    assert asyncio.run(made()) == first
    # One of other shards is another one, whatever its name.
    shards[0] = replace(shards[0], xxh3="0" * 16)
    (refused,) = asyncio.run(made())
    assert isinstance(refused, ev.SaveFailing)
    assert "was not made" in refused.error

"""Manifests are written once, whoever writes them: a controller that comes back finds what the one before has made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_samples import snapshots, state, written

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.checkpoint.manifest_json import to_json
from elastic.core.errors import IntegrityError
from elastic.core.settings import RunSettings
from elastic.runtime.controller.committer import Committer

LIMIT_S = 20.0


def test_a_checkpoint_that_was_made_and_not_told_is_told_by_the_next_controller(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), "run")
    shards = [store.write_shard(part) for part in snapshots(written("zero12", 2), state(), generation=1, step=4)]

    async def made() -> list[ev.Event]:
        told: list[ev.Event] = []
        committer = Committer(RunSettings("run"), store, {}, told.append, lambda *_: None, lambda _: None)
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


def one_shard(url: Path) -> tuple[CheckpointStore, Manifest]:
    store = CheckpointStore(str(url), "run")
    shards = [store.write_shard(part) for part in snapshots(written("zero12", 2), state(), generation=1, step=4)]
    return store, assemble(shards, run_id="run")


def test_a_folder_that_is_abandoned_while_it_is_committed_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit looks, then creates; another controller removes the shards between the two."""
    store, manifest = one_shard(tmp_path)
    create = store._objects.create

    def late(path: str, data: bytes) -> None:
        CheckpointStore(str(tmp_path), "run").abandon(manifest.id)
        create(path, data)

    monkeypatch.setattr(store._objects, "create", late)
    with pytest.raises(IntegrityError, match="is missing"):
        store.commit(manifest)
    assert store.list() == ()


def test_a_manifest_that_is_created_while_its_folder_is_abandoned_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = one_shard(tmp_path)
    other = CheckpointStore(str(tmp_path), "run")
    remove = other._objects.remove
    text = to_json(manifest).encode()

    def late(paths: Sequence[str]) -> None:
        remove(paths)
        if not any(path.endswith("manifest.json") for path in paths):
            store._objects.create(f"run/checkpoints/{manifest.id}/manifest.json", text)

    monkeypatch.setattr(other._objects, "remove", late)
    other.abandon(manifest.id)
    assert store.list() == ()


def test_a_manifest_that_reads_differently_is_not_written(tmp_path: Path) -> None:
    store, manifest = one_shard(tmp_path)
    strange = replace(manifest, versions={"torch": None})  # type: ignore[dict-item]
    with pytest.raises(IntegrityError):
        store.commit(strange)
    swapped = replace(manifest, digests={key: float(digest) for key, digest in manifest.digests.items()})  # type: ignore[misc]
    with pytest.raises((IntegrityError, ValueError)):
        store.commit(swapped)
    renamed = replace(manifest, shards=manifest.shards[::-1])
    with pytest.raises(IntegrityError):
        store.commit(renamed)
    assert store.list() == ()
    # NaN and tuples in what the user keeps are no reason.
    store.commit(
        replace(manifest, extra_state={**manifest.extra_state, "user": {"loss": float("nan"), "pair": (1, 2)}})
    )
    assert [ref.id for ref in store.list()] == [manifest.id]

"""What every kind of storage must do: tests on the fixtures `objects` and `store`, run wherever they are imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from checkpoint_samples import one_snapshot, snapshots, state, written

from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import Fenced, IntegrityError, UsageError
from elastic.core.names import CheckpointRef
from elastic.store.objects import Objects


def save(store: CheckpointStore, world: int = 3, step: int = 40, generation: int = 3, seed: int = 0) -> Manifest:
    taken = snapshots(written("zero12", world), state(seed), step=step, generation=generation)
    manifest = assemble([store.write_shard(snapshot) for snapshot in taken], run_id="run", written_at=1.0)
    store.commit(manifest)
    return manifest


def everything(manifest: Manifest) -> list[ReadRange]:
    from elastic.checkpoint.shards import DTYPE_NAMES

    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return [
        ReadRange(shard.rank, stored.key, 0, stored.numel, torch.zeros(stored.numel, dtype=dtypes[stored.dtype]))
        for shard in manifest.shards
        for stored in shard.tensors
    ]


# --- the contract of Objects: the same for every kind of storage, and for the one that can fail ---


def test_objects_are_read_back(objects: Objects) -> None:
    objects.put("a/b/one", [b"he", memoryview(b""), bytearray(b"llo")])
    objects.put("a/b/one", [b"hello"])
    objects.put("a/two", [])
    assert objects.get("a/b/one") == b"hello"
    assert objects.get("a/two") == b""
    assert objects.sizes("a") == {"a/b/one": 5, "a/two": 0}
    assert objects.sizes("a/b") == {"a/b/one": 5}
    assert objects.sizes("nothing/here") == {}


def test_parts_are_read_into_place(objects: Objects) -> None:
    objects.put("x", [bytes(range(100))])
    one, two = bytearray(3), bytearray(4)
    objects.read_into("x", 10, [memoryview(one), memoryview(bytearray()), memoryview(two)])
    assert (bytes(one), bytes(two)) == (bytes(range(10, 13)), bytes(range(13, 17)))
    objects.read_into("x", 97, [memoryview(one)])
    assert bytes(one) == bytes(range(97, 100))


def test_several_places_of_one_object(objects: Objects) -> None:
    objects.put("x", [bytes(range(100))])
    parts = [bytearray(3), bytearray(2), bytearray(1)]
    views = [memoryview(part) for part in parts]
    objects.read_parts("x", [(90, views[:1]), (4, views[1:2]), (10, views[2:])])
    assert parts == [bytes(range(90, 93)), bytes(range(4, 6)), bytes([10])]
    with pytest.raises(IntegrityError, match="x ends at byte 100, but byte 102 is needed"):
        objects.read_parts("x", [(4, views[:1]), (99, views[:1])])
    with pytest.raises(IntegrityError, match="y is missing"):
        objects.read_parts("y", [(0, views[:1])])


def test_many_parts_in_one_read(objects: Objects) -> None:
    objects.put("x", [bytes(number % 251 for number in range(6000))])
    parts = [bytearray(2) for _ in range(3000)]
    objects.read_into("x", 0, [memoryview(part) for part in parts])
    assert b"".join(parts) == objects.get("x")


def test_what_is_missing_or_short(objects: Objects) -> None:
    objects.put("x", [b"12345"])
    for call in (lambda: objects.get("y"), lambda: objects.read_into("y", 0, [memoryview(bytearray(1))])):
        with pytest.raises(IntegrityError, match="y is missing"):
            call()
    with pytest.raises(IntegrityError, match="x ends at byte 5, but byte 7 is needed"):
        objects.read_into("x", 3, [memoryview(bytearray(4))])
    with pytest.raises(IntegrityError, match="cut off"):
        objects.read_into("x", 50, [memoryview(bytearray(4))])


def test_create_never_replaces(objects: Objects) -> None:
    objects.create("a/x", b"first")
    with pytest.raises(IntegrityError, match="exists already"):
        objects.create("a/x", b"second")
    assert objects.get("a/x") == b"first"
    assert objects.sizes("") == {"a/x": 5}


def test_remove_may_be_repeated(objects: Objects) -> None:
    objects.put("a/b/x", [b"1"])
    objects.put("a/b/y", [b"1"])
    objects.remove(["a/b/x", "a/b/never"])
    assert objects.sizes("a") == {"a/b/y": 1}
    objects.remove(["a/b/y", "a/b/x"])
    objects.remove(["a/b/y"])
    objects.remove([])
    assert objects.sizes("a") == {}


# --- checkpoints ---


def test_is_a_source(store: CheckpointStore) -> None:
    source: CheckpointSource = store
    assert source.name == "storage"
    store.check_writable()
    assert store.list() == ()


def test_a_checkpoint_comes_back(store: CheckpointStore) -> None:
    manifest = save(store)
    assert manifest.id == store.checkpoint_id(40, 3) == "step-00000040-g0003"
    assert store.list() == (CheckpointRef(3, 40),)
    assert store.manifest(manifest.id) == manifest
    assert store.verify_shards(manifest) == sum(shard.bytes for shard in manifest.shards)
    ranges = everything(manifest)
    read = store.read(manifest, ranges).storage
    assert read == sum(item.target.numel() * item.target.element_size() for item in ranges)
    for snapshot in snapshots(written("zero12", 3), state()):
        for item in ranges:
            if item.rank == snapshot.rank:
                assert torch.equal(item.target.view(torch.uint8), snapshot.tensors[item.key].view(torch.uint8))


def test_nothing_counts_before_its_manifest(store: CheckpointStore) -> None:
    store.write_shard(one_snapshot())
    assert store.list() == ()
    assert store.incomplete() == (CheckpointRef(3, 40),)
    with pytest.raises(IntegrityError, match=r"manifest\.json is missing"):
        store.manifest("step-00000040-g0003")
    store.abandon("step-00000040-g0003")
    assert store.incomplete() == ()


def test_newest_first_by_generation_then_step(store: CheckpointStore) -> None:
    for step, generation in ((40, 2), (60, 2), (45, 3), (20, 1)):
        save(store, 1, step, generation)
    assert store.list() == (CheckpointRef(3, 45), CheckpointRef(2, 60), CheckpointRef(2, 40), CheckpointRef(1, 20))


def test_delete_takes_the_manifest_first(store: CheckpointStore) -> None:
    manifest, other = save(store), save(store, step=50)
    store.delete(manifest.id)
    assert store.list() == (CheckpointRef(3, 50),)
    assert store.incomplete() == ()
    store.delete(manifest.id)
    assert store.verify_shards(other)


def test_a_committed_checkpoint_is_closed(store: CheckpointStore) -> None:
    manifest = save(store, 1)
    with pytest.raises(Fenced, match="committed already"):
        store.write_shard(one_snapshot())
    with pytest.raises(IntegrityError, match="exists already"):
        store.commit(replace(manifest, written_at=2.0))
    with pytest.raises(IntegrityError, match="delete it instead of abandoning it"):
        store.abandon(manifest.id)
    assert store.manifest(manifest.id) == manifest


def test_an_old_generation_writes_beside_not_over(store: CheckpointStore) -> None:
    manifest = save(store, 1, generation=4)
    store.write_shard(one_snapshot(generation=3))
    assert store.list() == (CheckpointRef(4, 40),)
    assert store.verify_shards(manifest)
    assert store.incomplete() == (CheckpointRef(3, 40),)


def test_commit_looks_for_the_shards(store: CheckpointStore, objects: Objects) -> None:
    taken = snapshots(written("zero12", 2), state())
    manifest = assemble([store.write_shard(snapshot) for snapshot in taken], run_id="run")
    path = f"run/checkpoints/{manifest.id}/{manifest.shards[1].file}"
    data = objects.get(path)
    objects.put(path, [data[:-1]])
    with pytest.raises(IntegrityError, match=f"has {len(data) - 1} bytes"):
        store.commit(manifest)
    objects.remove([path])
    with pytest.raises(IntegrityError, match="is missing"):
        store.commit(manifest)
    assert store.list() == ()


def test_runs_do_not_meet(objects: Objects) -> None:
    one, two = CheckpointStore("u", "run", objects=objects), CheckpointStore("u", "run2", objects=objects)
    manifest = save(one)
    assert two.list() == ()
    with pytest.raises(UsageError, match="cannot be kept with run 'run2'"):
        two.write_shard(one_snapshot())
    with pytest.raises(UsageError, match="cannot be kept with run 'run2'"):
        two.commit(manifest)
    objects.put(
        "run2/checkpoints/step-00000040-g0003/manifest.json",
        [objects.get(f"run/checkpoints/{manifest.id}/manifest.json")],
    )
    with pytest.raises(IntegrityError, match="is that of run/step-00000040-g0003"):
        two.manifest("step-00000040-g0003")


def test_names_cannot_leave_the_prefix(store: CheckpointStore, objects: Objects) -> None:
    for run_id in ("..", "a/b", "/etc", ""):
        with pytest.raises(UsageError, match="run id"):
            CheckpointStore("u", run_id, objects=objects)
    calls: Sequence[Callable[[str], object]] = (store.manifest, store.delete, store.abandon)
    for call in calls:
        for bad in ("../../other", "step-00000040-g0003/..", ""):
            with pytest.raises(IntegrityError, match="not the id of a checkpoint"):
                call(bad)


def test_foreign_files_are_left_alone(store: CheckpointStore, objects: Objects) -> None:
    objects.put("run/checkpoints/notes.txt", [b"mine"])
    objects.put("run/checkpoints/latest/manifest.json", [b"{}"])
    objects.put("run/journal/000.jsonl", [b"{}"])
    assert (store.list(), store.incomplete()) == ((), ())


def damage(objects: Objects, path: str, how: str) -> None:
    data = bytearray(objects.get(path))
    if how == "missing":
        objects.remove([path])
    elif how == "short":
        objects.put(path, [bytes(data[:-1])])
    elif how == "long":
        objects.put(path, [bytes(data), b"x"])
    else:
        data[len(data) - 3] ^= 4
        objects.put(path, [bytes(data)])


@pytest.mark.parametrize("how", ["missing", "short", "long", "flipped"])
def test_verify_finds_every_damage(store: CheckpointStore, objects: Objects, how: str) -> None:
    manifest = save(store)
    damage(objects, f"run/checkpoints/{manifest.id}/{manifest.shards[1].file}", how)
    with pytest.raises(IntegrityError, match="rank-00001-of-00003"):
        store.verify_shards(manifest)


@pytest.mark.parametrize("how", ["missing", "short"])
def test_reading_finds_what_is_cut_off(store: CheckpointStore, objects: Objects, how: str) -> None:
    manifest = save(store)
    damage(objects, f"run/checkpoints/{manifest.id}/{manifest.shards[1].file}", how)
    with pytest.raises(IntegrityError, match="rank-00001-of-00003"):
        store.read(manifest, everything(manifest))


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_a_damaged_manifest_is_no_manifest(store: CheckpointStore, objects: Objects, how: str) -> None:
    manifest = save(store)
    damage(objects, f"run/checkpoints/{manifest.id}/manifest.json", how)
    with pytest.raises(IntegrityError, match="manifest"):
        store.manifest(manifest.id)

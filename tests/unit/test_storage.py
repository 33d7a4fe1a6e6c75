from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_samples import one_snapshot, snapshots, state, written
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.faults import Fault, FaultyObjects, at
from elastic.checkpoint.objects import LocalObjects, Objects, RemoteObjects, open_objects, translated
from elastic.checkpoint.reading import requests
from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.assembly import assemble
from elastic.core.errors import ElasticError, Fenced, IntegrityError, StorageError, UsageError
from elastic.core.manifest import Manifest
from elastic.core.names import CheckpointRef

KINDS = ["path", "file url", "memory", "faulty path", "faulty memory"]


@pytest.fixture(params=KINDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    urls = {
        "path": str(tmp_path / "top"),
        "file url": f"file://{tmp_path}/top",
        "memory": f"memory://{uuid.uuid4().hex}",
    }
    inner = open_objects(urls[request.param.removeprefix("faulty ")])
    return FaultyObjects(inner) if request.param.startswith("faulty") else inner


@pytest.fixture
def store(objects: Objects) -> CheckpointStore:
    return CheckpointStore("the url", "run", objects=objects)


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


def test_a_failed_put_leaves_the_old_object_alone(tmp_path: Path) -> None:
    objects = FaultyObjects(LocalObjects(str(tmp_path)))
    objects.put("x", [b"old"])
    objects.decide = at("put", 2, Fault.DISK_FULL)
    with pytest.raises(StorageError, match="disk full: no space left to write x"):
        objects.put("x", [b"new and longer"])
    assert objects.get("x") == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"], "the half-written file still takes space"


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
    read = store.read(manifest, ranges)
    assert read == sum(item.target.numel() * item.target.element_size() for item in ranges)
    for snapshot in snapshots(written("zero12", 3), state()):
        for item in ranges:
            if item.rank == snapshot.rank:
                assert torch.equal(item.target.view(torch.uint8), snapshot.tensors[item.key].view(torch.uint8))


def test_nothing_counts_before_its_manifest(store: CheckpointStore) -> None:
    store.write_shard(one_snapshot())
    assert store.list() == ()
    assert store.incomplete() == (CheckpointRef(3, 40),)
    assert store.incomplete(older_than_generation=3) == ()
    assert store.incomplete(older_than_generation=4) == (CheckpointRef(3, 40),)
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
    with pytest.raises(IntegrityError, match="not abandoned but deleted"):
        store.abandon(manifest.id)
    assert store.manifest(manifest.id) == manifest


def test_an_old_generation_writes_beside_not_over(store: CheckpointStore) -> None:
    manifest = save(store, 1, generation=4)
    store.write_shard(one_snapshot(generation=3))
    assert store.list() == (CheckpointRef(4, 40),)
    assert store.verify_shards(manifest)
    assert store.incomplete(older_than_generation=4) == (CheckpointRef(3, 40),)


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


# --- ranges ---


@given(data=st.data(), gap=st.sampled_from([0, 40]), limit=st.integers(1, 200))
def test_requests_fetch_each_byte_once(data: st.DataObject, gap: int, limit: int) -> None:
    layout = written("zero12", 2)
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}", "run", max_gap_bytes=gap, max_read_bytes=limit)
    manifest = save(store, 2)
    full = {s.rank: s.tensors for s in snapshots(layout, state())}
    ranges = []
    for shard in manifest.shards:
        for stored in shard.tensors:
            if not stored.numel or data.draw(st.booleans()):
                continue
            offset = data.draw(st.integers(0, stored.numel - 1))
            numel = data.draw(st.integers(1, stored.numel - offset))
            target = torch.zeros(numel, dtype=full[shard.rank][stored.key].dtype)
            ranges.append(ReadRange(shard.rank, stored.key, offset, numel, target))
    reads = requests(manifest, ranges, max_bytes=limit, max_gap_bytes=gap)
    needed = sum(item.numel * item.target.element_size() for item in ranges)
    assert all(read.bytes <= limit for read in reads)
    assert sum(read.bytes for read in reads) == needed if gap == 0 else sum(read.bytes for read in reads) >= needed
    assert store.read(manifest, ranges) == sum(read.bytes for read in reads)
    for item in ranges:
        stored_part = full[item.rank][item.key][item.offset : item.offset + item.numel]
        assert torch.equal(item.target.view(torch.uint8), stored_part.view(torch.uint8))


def test_neighbours_become_one_read(tmp_path: Path) -> None:
    objects = FaultyObjects(LocalObjects(str(tmp_path)))
    store = CheckpointStore("u", "run", objects=objects, max_gap_bytes=0)
    manifest = save(store, 1)
    objects.calls.clear()
    key = "fp32/group0"
    parts = [torch.zeros(5) for _ in range(4)]
    store.read(manifest, [ReadRange(0, key, 5 * n, 5, part) for n, part in reversed(list(enumerate(parts)))])
    assert objects.calls["read_into"] == 1
    assert torch.equal(torch.cat(parts), snapshots(written("zero12", 1), state())[0].tensors[key][:20])
    assert store.read(manifest, []) == 0


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (ReadRange(9, "fp32/group0", 0, 1, torch.zeros(1)), "no tensor 'fp32/group0'"),
        (ReadRange(0, "fp32/other", 0, 1, torch.zeros(1)), "no tensor 'fp32/other'"),
        (ReadRange(0, "fp32/group0", 0, 1, torch.zeros(1).double()), "stored as F32"),
        (ReadRange(0, "fp32/group0", 0, 2, torch.zeros(1)), "memory of 2 elements"),
        (ReadRange(0, "fp32/group0", 0, 4, torch.zeros(2, 2)), "1-D"),
        (ReadRange(0, "fp32/group0", 10**6, 1, torch.zeros(1)), "not \\[1000000, 1000001\\)"),
        (ReadRange(0, "fp32/group0", -1, 1, torch.zeros(1)), "not \\[-1, 0\\)"),
    ],
)
def test_ranges_outside_are_refused(item: ReadRange, message: str) -> None:
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}", "run")
    with pytest.raises(IntegrityError, match=message):
        store.read(save(store, 1), [item])


# --- faults ---

STEPS = ["put", "create", "get", "read_into", "sizes", "remove"]


@pytest.mark.parametrize("operation", STEPS)
@pytest.mark.parametrize("fault", list(Fault))
def test_whatever_fails_no_wrong_checkpoint_is_believed(tmp_path: Path, operation: str, fault: Fault) -> None:
    """Save a second checkpoint while the nth operation goes wrong, for each n; then read the newest provable one."""
    for number in range(1, 5):
        objects = FaultyObjects(LocalObjects(str(tmp_path / f"{number}")))
        store = CheckpointStore("u", "run", objects=objects)
        first = save(store, 2, step=10, seed=1)
        objects.calls.clear()
        objects.decide = at(operation, number, fault)
        with contextlib.suppress(StorageError, IntegrityError):  # and no other error
            save(store, 2, step=20, seed=2)
            store.delete(first.id)
        objects.decide = lambda operation, number, path: None
        believed = None
        for ref in store.list():
            try:
                manifest = store.manifest(ref.id)
                store.verify_shards(manifest)
                believed = manifest
                break
            except IntegrityError:
                continue
        undetected = fault in (Fault.TRUNCATE, Fault.FLIP) and operation in ("put", "create")
        assert believed is not None or undetected, "both checkpoints were lost"
        if believed is not None:
            expected = snapshots(written("zero12", 2), state(1 if believed.step == 10 else 2), step=believed.step)
            ranges = everything(believed)
            store.read(believed, ranges)
            for item in ranges:
                tensor = expected[item.rank].tensors[item.key]
                assert torch.equal(item.target.view(torch.uint8), tensor.view(torch.uint8))


def test_faults_are_seen_when_reading() -> None:
    objects = FaultyObjects(open_objects(f"memory://{uuid.uuid4().hex}"))
    store = CheckpointStore("u", "run", objects=objects)
    manifest = save(store, 1)
    for fault, error in ((Fault.FAIL, StorageError), (Fault.TRUNCATE, IntegrityError), (Fault.FLIP, None)):
        objects.calls.clear()
        objects.decide = at("read_into", 1, fault)
        ranges = everything(manifest)
        if error is None:
            store.read(manifest, ranges)  # nobody notices here; the content checks do
            objects.calls.clear()
            with pytest.raises(IntegrityError, match="not what was written"):
                store.verify_shards(manifest)
        else:
            with pytest.raises(error):
                store.read(manifest, ranges)


# --- addresses ---


def test_addresses_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use 'nosuch://x' as storage"):
        CheckpointStore("nosuch://x", "run")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ElasticError, match="checkpoints cannot be kept at"):
        CheckpointStore(str(tmp_path / "file"), "run").check_writable()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError(13, "denied"), UsageError, "does not allow access to x"),
        (NotADirectoryError(20, "a file"), UsageError, "does not allow access to x"),
        (OSError(errno.EDQUOT, "quota"), StorageError, "disk full"),
        (OSError(errno.EIO, "broken"), StorageError, "storage failed at x"),
        (TimeoutError("slow"), StorageError, "storage failed at x"),
        (FileNotFoundError("x"), IntegrityError, "x is missing"),
        (KeyError("from a driver"), StorageError, "KeyError"),
        (Fenced("ours"), Fenced, "ours"),
    ],
)
def test_every_foreign_error_has_one_of_ours(error: Exception, kind: type[ElasticError], message: str) -> None:
    with pytest.raises(kind, match=message), translated("x"):
        raise error
    if isinstance(error, FileNotFoundError):
        with pytest.raises(StorageError), translated("x", writing=True):
            raise error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="does not allow access"):
        CheckpointStore(str(tmp_path / "x"), "run").check_writable()


def test_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", not_installed)
    with pytest.raises(UsageError, match="cannot use 's3://bucket/x' as storage: Install s3fs"):
        CheckpointStore("s3://bucket/x", "run")


class Driver(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """An object store's driver with errors of its own, and one for a range behind the end."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        raise RuntimeError("ClientError: InvalidRange" if path.endswith("short") else "ClientError: SlowDown")

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        return {"name": path, "size": 5, "type": "file"}


def test_errors_of_drivers_become_ours() -> None:
    objects = RemoteObjects(Driver(), "bucket")
    with pytest.raises(StorageError, match="storage failed at x: RuntimeError: ClientError: SlowDown"):
        objects.get("x")
    with pytest.raises(StorageError, match="SlowDown"):
        objects.read_into("x", 0, [memoryview(bytearray(4))])
    with pytest.raises(IntegrityError, match="short ends at byte 5, but byte 14 is needed"):
        objects.read_into("short", 10, [memoryview(bytearray(4))])


def test_a_full_disk_is_said_plainly() -> None:
    objects = FaultyObjects(open_objects(f"memory://{uuid.uuid4().hex}"), at("put", 1, Fault.DISK_FULL))
    store = CheckpointStore("somewhere", "run", objects=objects)
    with pytest.raises(StorageError, match="cannot be kept at 'somewhere': disk full"):
        store.check_writable()
    store.check_writable()


def test_no_temporary_file_survives(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), "run")
    store.check_writable()
    manifest = save(store, 2)
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["manifest.json", *(shard.file for shard in manifest.shards)]
    store.delete(manifest.id)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []

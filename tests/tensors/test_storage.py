from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_samples import snapshots, state, written
from hypothesis import given
from hypothesis import strategies as st
from storage_contract import *  # noqa: F403 - the tests of the contract, with this module's fixtures
from storage_contract import everything, save
from storage_faults import Fault, FaultyObjects, at

from elastic.checkpoint.reading import requests
from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.errors import ElasticError, Fenced, IntegrityError, StorageError, UsageError
from elastic.store.errors import translated
from elastic.store.local import LocalObjects
from elastic.store.objects import Objects
from elastic.store.open import open_objects
from elastic.store.remote import RemoteObjects

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


def test_a_failed_put_leaves_the_old_object_alone(tmp_path: Path) -> None:
    objects = FaultyObjects(LocalObjects(str(tmp_path)))
    objects.put("x", [b"old"])
    objects.decide = at("put", 2, Fault.DISK_FULL)
    with pytest.raises(StorageError, match="disk full: no space left to write x"):
        objects.put("x", [b"new and longer"])
    assert objects.get("x") == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"], "the half-written file still takes space"


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
            stride = numel + data.draw(st.integers(0, 3))
            rows = 1 + data.draw(st.integers(0, min(5, (stored.numel - offset - numel) // stride)))
            target = torch.zeros(rows * numel, dtype=full[shard.rank][stored.key].dtype)
            ranges.append(ReadRange(shard.rank, stored.key, offset, numel, target, rows, stride))
    reads = requests(manifest, ranges, max_bytes=limit, max_gap_bytes=gap)
    needed = sum(item.rows * item.numel * item.target.element_size() for item in ranges)
    assert all(read.bytes <= limit for read in reads)
    assert sum(read.bytes for read in reads) == needed if gap == 0 else sum(read.bytes for read in reads) >= needed
    assert store.read(manifest, ranges) == BytesRead(storage=sum(read.bytes for read in reads))
    for item in ranges:
        stored_part = full[item.rank][item.key][item.offset : item.stop]
        rows = stored_part.as_strided((item.rows, item.numel), (item.stride, 1), stored_part.storage_offset())
        assert torch.equal(item.target.view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8))


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
    assert store.read(manifest, []) == BytesRead()


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
    def not_installed(url: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", not_installed)
    with pytest.raises(UsageError, match="cannot use 's3://bucket/x' as storage: its driver is not installed"):
        CheckpointStore("s3://bucket/x", "run")


class Driver(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """An object store's driver with errors of its own, and one for a range behind the end."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        raise RuntimeError("ClientError: InvalidRange" if path.endswith("short") else "ClientError: SlowDown")

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        return {"name": path, "size": 5, "type": "file"}


def test_errors_of_drivers_become_ours() -> None:
    objects = RemoteObjects(Driver(), "bucket", pause=lambda _: None)
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

"""What goes wrong between a run and S3, over real HTTP: nothing wrong is believed, nothing accepted is lost."""

from __future__ import annotations

import contextlib
import gc
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from checkpoint_samples import one_snapshot, snapshots, state, written
from s3_proxy import Proxy, Request, Trouble, first
from storage_contract import everything, save

from elastic.checkpoint.storage import CheckpointStore
from elastic.checkpoint.writer import BackgroundWriter
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import ElasticError, Fenced, IntegrityError, StorageError, UsageError
from elastic.core.names import CheckpointRef
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.object_segments import ObjectSegments
from elastic.store.address import file_system
from elastic.store.open import open_objects
from elastic.store.s3 import S3Objects

# The least that S3 takes.
PART = 5 << 20


def in_parts(url: str, timeout_s: float = 60.0) -> S3Objects:
    """Uploads in parts of 5 MiB instead of 32."""
    fs, root = file_system(url)
    return S3Objects(fs, root, timeout_s, part_bytes=PART)


def data(megabytes: float) -> bytes:
    return bytes(range(256)) * int(megabytes * 4096)


def uploads_of(objects: S3Objects) -> list[str]:
    return [path for path in objects.sizes("", unfinished=True) if "?upload=" in path]


# --- requests that fail and are asked again ---

PASSING = [
    Trouble.SLOW_DOWN,
    Trouble.INTERNAL,
    Trouble.TIMEOUT,
    Trouble.EXPIRED,
    Trouble.CUT_UPLOAD,
    Trouble.LOST_ANSWER,
]


@pytest.mark.parametrize("trouble", PASSING)
@pytest.mark.parametrize("operation", ["PutObject", "GetObject", "ListObjects", "DeleteObjects"])
def test_what_passes_is_asked_again(url: str, proxy: Proxy, operation: str, trouble: Trouble) -> None:
    objects = in_parts(url)
    proxy.decide = first(2, trouble, operation)
    objects.put("a", [b"12345"])
    objects.create("b", b"67890")
    assert objects.get("a") == b"12345"
    assert objects.sizes("") == {"a": 5, "b": 5}
    objects.remove(["a"])
    assert objects.sizes("") == {"b": 5}
    assert proxy.operations().count(operation) >= 3


def test_a_store_that_stays_away_is_said_in_one_sentence(url: str, proxy: Proxy) -> None:
    proxy.decide = lambda request: Trouble.SLOW_DOWN
    with pytest.raises(StorageError, match="storage failed at a: SlowDown as asked for") as caught:
        in_parts(url).put("a", [b"1"])
    assert "\n" not in str(caught.value)
    assert len(proxy.seen) == 5, "five tries and no more: the writer's own pauses come next"


def test_rights_are_not_asked_for_again(url: str, proxy: Proxy) -> None:
    proxy.decide = lambda request: Trouble.DENIED
    with pytest.raises(UsageError, match="does not allow access to a: AccessDenied"):
        in_parts(url).put("a", [b"1"])
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("operation", ["PutObject", "GetObject", "ListObjects"])
def test_a_stall_is_bounded(url: str, proxy: Proxy, operation: str) -> None:
    store = CheckpointStore(url, "run", timeout_s=0.5)
    proxy.decide = first(99, Trouble.STALL, operation)
    with pytest.raises(StorageError, match="it did not answer in time"):
        save(store, 1)
    proxy.decide = lambda request: None
    save(CheckpointStore(url, "run"), 1)


# --- uploads in parts ---


def test_a_large_object_goes_in_parts(url: str, proxy: Proxy) -> None:
    objects = in_parts(url)
    objects.put("x", [data(3), data(3), b"", data(5.5)])
    assert objects.get("x") == data(3) + data(3) + data(5.5)
    assert proxy.operations().count("UploadPart") == 3
    assert uploads_of(objects) == []


@pytest.mark.parametrize("trouble", [Trouble.SLOW_DOWN, Trouble.CUT_UPLOAD, Trouble.LOST_ANSWER])
@pytest.mark.parametrize("operation", ["CreateUpload", "UploadPart", "CompleteUpload"])
def test_a_part_that_fails_is_sent_again(url: str, proxy: Proxy, operation: str, trouble: Trouble) -> None:
    objects = in_parts(url)
    proxy.decide = first(1, trouble, operation)
    objects.put("x", [data(11)])
    assert objects.get("x") == data(11)


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteUpload"])
def test_an_upload_that_fails_leaves_the_old_object_and_no_parts(url: str, proxy: Proxy, operation: str) -> None:
    objects = in_parts(url)
    objects.put("x", [b"old"])
    proxy.decide = lambda request: Trouble.CUT_UPLOAD if request.operation == operation else None
    with pytest.raises(StorageError):
        objects.put("x", [data(11)])
    assert objects.get("x") == b"old"
    assert uploads_of(objects) == []


def test_a_writer_that_fails_leaves_the_old_object_and_no_parts(url: str) -> None:
    objects = in_parts(url)
    objects.put("x", [b"old"])

    def chunks() -> Any:
        yield data(11)
        raise OSError("the snapshot is gone")

    with pytest.raises(StorageError, match="the snapshot is gone"):
        objects.put("x", chunks())
    assert objects.get("x") == b"old"
    assert uploads_of(objects) == []


def test_parts_of_a_killed_writer_are_found_and_removed(url: str) -> None:
    objects = in_parts(url)
    store = CheckpointStore("u", "run", objects=objects)
    path = "run/checkpoints/step-00000040-g0003/rank-00000-of-00001.safetensors"
    begun = objects._call("create_multipart_upload", path)
    objects._call("upload_part", path, UploadId=begun["UploadId"], PartNumber=1, Body=data(5))
    assert objects.sizes("run") == {}
    assert store.list() == ()
    assert store.incomplete() == (CheckpointRef(3, 40),)
    store.abandon("step-00000040-g0003")
    assert store.incomplete() == ()
    assert uploads_of(objects) == []


def test_the_parts_of_others_are_left_alone(url: str) -> None:
    objects = in_parts(url)
    objects._call("create_multipart_upload", "other/checkpoints/step-00000040-g0003/x")
    CheckpointStore("u", "run", objects=objects).abandon("step-00000040-g0003")
    assert len(uploads_of(objects)) == 1


def test_without_the_right_to_list_uploads_everything_else_works(url: str, proxy: Proxy) -> None:
    proxy.decide = lambda request: Trouble.DENIED if request.operation == "ListUploads" else None
    store = CheckpointStore(url, "run")
    manifest = save(store, 1)
    assert store.incomplete() == ()
    store.delete(manifest.id)
    assert store.list() == ()


# --- checkpoints ---


def test_a_checkpoint_whose_upload_was_cut_is_never_listed(url: str, proxy: Proxy) -> None:
    store = CheckpointStore("u", "run", objects=in_parts(url))
    taken = snapshots(written("zero12", 2), state())
    proxy.decide = lambda request: Trouble.CUT_UPLOAD if "rank-00001" in request.path else None
    one = store.write_shard(taken[0])
    with pytest.raises(StorageError):
        store.write_shard(taken[1])
    assert store.list() == ()
    proxy.decide = lambda request: None
    manifest = assemble([one, store.write_shard(taken[1])], run_id="run")
    store.commit(manifest)
    assert store.list() == (CheckpointRef(3, 40),)
    assert store.verify_shards(manifest) == sum(shard.bytes for shard in manifest.shards)


@pytest.mark.parametrize("always", [False, True])
def test_a_commit_whose_answer_is_lost_has_happened(url: str, proxy: Proxy, always: bool) -> None:
    """Once: asked again at once. Always: the caller commits the same manifest again later."""
    store = CheckpointStore("u", "run", objects=in_parts(url))
    manifest = assemble([store.write_shard(one_snapshot())], run_id="run", written_at=1.0)
    proxy.decide = first(1000 if always else 1, Trouble.LOST_ANSWER, "PutObject", "manifest.json")
    if always:
        with pytest.raises(StorageError):
            store.commit(manifest)
        proxy.decide = lambda request: None
    store.commit(manifest)
    assert store.manifest(manifest.id) == manifest


@pytest.mark.parametrize("trouble", [Trouble.TRUNCATE, Trouble.CUT_ANSWER])
def test_a_download_that_is_cut_is_noticed(url: str, proxy: Proxy, trouble: Trouble) -> None:
    """A connection that ends too soon is asked again; an object that is too short is damage, and is not."""
    store = CheckpointStore("u", "run", objects=in_parts(url))
    manifest = save(store)
    proxy.decide = first(1, trouble, "GetObject", "rank-00001")
    if trouble is Trouble.TRUNCATE:
        with pytest.raises(IntegrityError, match="rank-00001-of-00003"):
            store.read(manifest, everything(manifest))
    else:
        store.read(manifest, everything(manifest))
    assert store.verify_shards(manifest)


def test_training_goes_on_while_writes_are_tried_again(url: str, proxy: Proxy) -> None:
    """The writer's thread keeps at it; whoever trains is not held up, and the shard is there in the end."""
    proxy.decide = lambda request: Trouble.SLOW_DOWN if request.operation == "PutObject" else None
    done, failed = threading.Event(), threading.Event()
    records: list[ShardRecord] = []
    store = CheckpointStore("u", "run", objects=in_parts(url))

    def on_failed(step: int, error: ElasticError, retry_s: float | None) -> None:
        proxy.decide = lambda request: None
        failed.set()

    writer = BackgroundWriter(store, lambda r: (records.append(r), done.set())[0], on_failed, backoff_s=0.01)
    try:
        assert writer.submit(one_snapshot())
        assert failed.wait(30)
        assert done.wait(30)
    finally:
        assert writer.close(30)
    store.commit(assemble(records, run_id="run"))
    assert store.list() == (CheckpointRef(3, 40),)


# --- the journal and its fence ---


def claims(urls: list[str], count: int) -> list[int | None]:
    """Incarnations that so many controllers get that claim number 1 at the same moment."""
    ready, got = threading.Barrier(count), [None] * count

    def claim(number: int) -> None:
        from elastic.observe.open_segments import open_segments

        segments = open_segments(urls[number % len(urls)], "run")
        segments.incarnations()
        ready.wait()
        try:
            segments.claim(1)
        except Fenced:
            return
        got[number] = 1  # type: ignore[call-overload]

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_one_of_many_controllers_gets_an_incarnation(url: str) -> None:
    assert [got for got in claims([url], 6) if got] == [1]


def test_no_two_get_it_where_the_store_knows_no_conditions(url: str, proxy: Proxy) -> None:
    def unconditional(request: Request) -> Trouble | None:
        return Trouble.UNCONDITIONAL if "if-none-match" in request.headers else None

    proxy.decide = unconditional
    assert len([got for got in claims([url], 6) if got]) <= 1
    # The next number goes to somebody, all the same.
    assert JournalWriter(url, "run").incarnation == 2


def test_a_store_that_refuses_conditions_can_be_used(url: str, proxy: Proxy) -> None:
    def refuse(request: Request) -> Trouble | None:
        return Trouble.NOT_IMPLEMENTED if "if-none-match" in request.headers else None

    proxy.decide = refuse
    objects = open_objects(url)
    objects.create("x", b"first")
    with pytest.raises(IntegrityError, match="exists already"):
        objects.create("x", b"second")
    assert JournalWriter(url, "run").incarnation == 1


@pytest.mark.parametrize("trouble", [Trouble.LOST_ANSWER, Trouble.SLOW_DOWN])
def test_a_claim_that_is_asked_for_again_is_still_ours(url: str, proxy: Proxy, trouble: Trouble) -> None:
    proxy.decide = first(1, trouble, "PutObject", "00000000.jsonl")
    assert JournalWriter(url, "run").incarnation == 1


def types(url: str) -> list[str]:
    return [record["type"] for record in JournalReader(url, "run").records()]


@pytest.mark.parametrize("trouble", [Trouble.LOST_ANSWER, Trouble.CUT_UPLOAD])
def test_a_journal_that_was_away_has_every_record_once(url: str, proxy: Proxy, trouble: Trouble) -> None:
    """Also where the store had taken what it could not confirm."""
    writer = JournalWriter(url, "run")
    proxy.decide = lambda request: trouble if request.operation == "PutObject" else None
    for waiting in ([{"type": "a"}], [{"type": "a"}, {"type": "b"}]):
        with pytest.raises(StorageError, match="the journal at"):
            writer.extend(waiting)
    proxy.decide = lambda request: None
    stamped = writer.extend([{"type": "a"}, {"type": "b"}, {"type": "c"}])
    assert [record["seq"] for record in stamped] == [2, 3, 4]
    writer.append({"type": "d"})
    reader = JournalReader(url, "run")
    assert [(r["type"], r["seq"]) for r in reader.records()] == [("begin", 1), ("a", 2), ("b", 3), ("c", 4), ("d", 5)]
    assert reader.problems == ()


def test_a_try_that_arrives_late_changes_nothing(url: str) -> None:
    """The first try is given up, and reaches the store after the second has succeeded."""
    writer = JournalWriter(url, "run")
    segments: Any = writer._segments
    put: Callable[..., None] = segments._objects.put
    late: list[tuple[str, list[bytes]]] = []

    def give_up(path: str, chunks: Any) -> None:
        late.append((path, list(chunks)))
        raise StorageError("it did not answer in time")

    segments._objects.put = give_up
    with pytest.raises(StorageError):
        writer.append({"type": "a"})
    segments._objects.put = put
    writer.extend([{"type": "a"}, {"type": "b"}])
    put(*late[0])
    writer.append({"type": "c"})
    assert types(url) == ["begin", "a", "b", "c"]


def test_a_long_journal_is_read_at_once(url: str, proxy: Proxy) -> None:
    writer = JournalWriter(url, "run")
    for number in range(20):
        writer.append({"type": f"t{number}"})
    reader = JournalReader(url, "run")
    assert len(reader.records()) == 21
    proxy.seen.clear()
    writer.append({"type": "new"})
    proxy.seen.clear()
    assert reader.records()[-1]["type"] == "new"
    assert proxy.operations().count("GetObject") == 1, "what was read is not read again"


# --- addresses and rights ---


def test_a_bucket_that_is_not_there(proxy: Proxy) -> None:
    store = CheckpointStore(f"s3://no-such-{uuid.uuid4().hex[:8]}/x", "run")
    with pytest.raises(UsageError, match="no such bucket"):
        store.check_writable()


def test_a_bucket_is_never_made(proxy: Proxy) -> None:
    from elastic_jobs.run_folder import RunFolder

    name = f"no-such-{uuid.uuid4().hex[:8]}"
    with pytest.raises(UsageError, match="no such bucket"):
        RunFolder(f"s3://{name}/x", "run").write("job.json", {})
    assert not any(r.method == "PUT" and r.path.strip("/") == name for r in proxy.seen)


def test_no_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fs, root = file_system(f"{url}/fresh")
    # A file system of its own: fsspec gives the same one again, which has its credentials already.
    other = type(fs)(skip_instance_cache=True, **fs.storage_options)
    with pytest.raises(UsageError, match="storage wants credentials for x and none are set"):
        S3Objects(other, root).put("x", [b"1"])


def test_what_lies_beside_the_prefix_is_not_ours(url: str) -> None:
    objects, above = open_objects(url), open_objects(url.rpartition("/")[0])
    above.put("runs-of-others/a", [b"1"])
    objects.put("b", [b"1"])
    assert objects.sizes("") == {"b": 1}
    assert objects.names("") == ["b"]
    assert above.names("") == ["runs", "runs-of-others"]


# --- what it costs ---


def counted(proxy: Proxy) -> dict[str, int]:
    """Requests since the last look, by operation."""
    found = Counter(proxy.operations())
    proxy.seen.clear()
    return dict(found)


def test_requests_of_a_checkpoint(url: str, proxy: Proxy) -> None:
    """What docs/storage.md says."""
    store = CheckpointStore(url, "run")
    manifest = save(store, 4)
    assert counted(proxy) == {"GetObject": 4, "PutObject": 4 + 1, "ListObjects": 2}
    store.list()
    store.incomplete()
    assert counted(proxy) == {"ListObjects": 2, "ListUploads": 1}
    store.delete(manifest.id)
    assert counted(proxy) == {"DeleteObjects": 2, "ListObjects": 1, "ListUploads": 1}
    in_parts(url).put("x", [data(11)])
    assert counted(proxy) == {"CreateUpload": 1, "UploadPart": 3, "CompleteUpload": 1}


def test_requests_of_a_journal(url: str, proxy: Proxy) -> None:
    writer = JournalWriter(url, "run")
    counted(proxy)
    writer.append({"type": "a"})
    assert counted(proxy) == {"ListObjects": 1, "PutObject": 1}
    segments = ObjectSegments(open_objects(url), "run/other", joined=2)
    segments.claim(1)
    segments.append(1, "1\n")
    counted(proxy)
    segments.append(1, "2\n")
    assert counted(proxy) == {"PutObject": 1 + 1, "DeleteObjects": 1}


class Large:
    """What a caller holds while it asks, an engine for example."""


@pytest.mark.parametrize("trouble", [*PASSING, Trouble.STALL])
def test_a_failed_request_keeps_nothing_of_its_caller_alive(url: str, proxy: Proxy, trouble: Trouble) -> None:
    """A worker's process is thrown away when the engine of a generation outlives it."""
    in_parts(url).put("x", [b"12345"])
    objects = in_parts(url, timeout_s=0.5 if trouble is Trouble.STALL else 60.0)

    def ask() -> weakref.ReferenceType[Large]:
        large = Large()
        proxy.decide = first(2, trouble, "GetObject")
        with contextlib.suppress(StorageError):
            objects.get("x")
        return weakref.ref(large)

    for _ in range(5):
        left = ask()
        gc.collect()
        assert left() is None, gc.get_referrers(left())

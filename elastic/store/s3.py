"""Objects in S3 and compatible stores: as few requests as possible, and no stale answer from a cache.

The driver's own file objects commit a half-written object when the writer fails, upload one part at a time, and never
remove unfinished parts; so uploads are made here from the service's own requests (`S3FileSystem.call_s3`).
Semantics: https://docs.aws.amazon.com/AmazonS3/latest/userguide/Welcome.html#ConsistencyModel
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from elastic.core.errors import ElasticError, IntegrityError, StorageError
from elastic.core.names import check_path
from elastic.store.errors import cut_off, service_code, translated
from elastic.store.objects import TIMEOUT_S, Chunk
from elastic.store.remote import RemoteObjects

logger = logging.getLogger(__name__)

# S3 takes at most 10,000 parts: 312 GiB in one object.
PART_BYTES = 32 << 20
_PARTS_AT_ONCE = 4
_KEYS_PER_DELETE = 1000
# Never part of a valid path: names are checked for it.
_UPLOAD = "?upload="
_WRITE = "elastic-write"


class S3Objects(RemoteObjects):
    """`Objects` below s3://bucket/prefix. Objects of more than `part_bytes` are uploaded in parts, four at once."""

    def __init__(
        self, fs: Any, root: str, timeout_s: float = TIMEOUT_S, *, part_bytes: int = PART_BYTES, **options: Any
    ) -> None:
        super().__init__(fs, root, timeout_s, **options)
        self._bucket, prefix, _ = fs.split_path(self._root)
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        with translated(path, writing=True):
            parts = _parts(chunks, self._part_bytes)
            first = next(parts, b"")
            second = next(parts, None)
            if second is None:
                self._call("put_object", path, writing=True, Body=first)
            else:
                self._upload(path, itertools.chain([first, second], parts))

    def get(self, path: str) -> bytes:
        # One request: objects that are read whole are small, and a request for the size would double the cost.
        return self._tried(path, lambda limits: bytes(self._fs.cat_file(self._at(path), max_concurrency=1, **limits)))

    def names(self, folder: str) -> list[str]:
        prefix = self._key(f"{folder}/") if folder else self._prefix
        found = set()
        for page in self._pages("list_objects_v2", folder, Prefix=prefix, Delimiter="/"):
            found |= {item["Key"] for item in page.get("Contents", ())}
            found |= {item["Prefix"] for item in page.get("CommonPrefixes", ())}
        # Some tools write an empty object for a folder.
        return sorted(name[len(prefix) :].rstrip("/") for name in found if name != prefix)

    def sizes(self, folder: str, *, unfinished: bool = False) -> dict[str, int]:
        prefix = self._key(f"{folder}/") if folder else self._prefix
        cut = len(self._prefix)
        found = {
            item["Key"][cut:]: int(item["Size"])
            for page in self._pages("list_objects_v2", folder, Prefix=prefix)
            for item in page.get("Contents", ())
            if not item["Key"].endswith("/")
        }
        if unfinished:
            found |= {f"{key[cut:]}{_UPLOAD}{upload}": 0 for key, upload in self._uploads(folder, prefix)}
        return found

    def remove(self, paths: Sequence[str]) -> None:
        uploads = [path for path in paths if _UPLOAD in path]
        for path in uploads:
            key, _, upload = check_path(path).partition(_UPLOAD)
            with contextlib.suppress(IntegrityError):  # it is over by now
                self._call("abort_multipart_upload", key, UploadId=upload)
        objects = [path for path in paths if _UPLOAD not in path]
        for begin in range(0, len(objects), _KEYS_PER_DELETE):
            self._delete(objects[begin : begin + _KEYS_PER_DELETE])

    def _create(self, path: str, data: bytes, limits: dict[str, Any]) -> None:
        try:
            self._request("put_object", path, limits, Body=data, IfNoneMatch="*")
        except OSError as error:
            if service_code(error) not in ("NotImplemented", "501"):
                raise
            # The store does not support conditional writes.
            if self._size(path) is not None:
                raise FileExistsError(path) from error
            self._request("put_object", path, limits, Body=data)

    def _range(self, path: str, begin: int, end: int, limits: dict[str, Any]) -> memoryview:
        try:
            return memoryview(self._fs.cat_file(self._at(path), start=begin, end=end, **limits))
        except OSError as error:
            if service_code(error) not in ("InvalidRange", "416"):
                raise
            raise cut_off(path, end, self._size(path) or 0) from None

    def _size(self, path: str) -> int | None:
        # By a listing: a HEAD cannot tell a missing object from a forbidden one.
        for page in self._pages("list_objects_v2", path, Prefix=self._key(path), MaxKeys=1):
            for item in page.get("Contents", ()):
                if item["Key"] == self._key(path):
                    return int(item["Size"])
        return None

    # --- uploads in parts ---

    def _upload(self, path: str, parts: Iterator[bytes]) -> None:
        mark = uuid.uuid4().hex
        begun = self._call("create_multipart_upload", path, writing=True, Metadata={_WRITE: mark})
        upload = str(begun["UploadId"])
        try:
            tags = self._send(path, upload, parts)
            done = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]}
            self._finish(path, upload, mark, done)
        except BaseException:
            with contextlib.suppress(ElasticError):
                self._call("abort_multipart_upload", path, UploadId=upload)
            raise

    def _send(self, path: str, upload: str, parts: Iterator[bytes]) -> list[str]:
        """The parts' tags, in order. Only parts that are being sent are held in memory."""

        def send(number: int, part: bytes) -> str:
            sent = self._call("upload_part", path, writing=True, UploadId=upload, PartNumber=number, Body=part)
            return str(sent["ETag"])

        tags: list[str] = []
        with ThreadPoolExecutor(_PARTS_AT_ONCE, "checkpoint-write") as pool:
            under_way: deque[Future[str]] = deque()
            try:
                for number, part in enumerate(parts, 1):
                    under_way.append(pool.submit(send, number, part))
                    if len(under_way) >= _PARTS_AT_ONCE:
                        tags.append(under_way.popleft().result())
                tags += [job.result() for job in under_way]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return tags

    def _finish(self, path: str, upload: str, mark: str, done: dict[str, Any]) -> None:
        try:
            self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload=done)
        except IntegrityError:
            # No such upload: another process aborted it, or an earlier attempt completed it.
            if self._mark(path) != mark:
                raise StorageError(
                    f"the upload of {path} was aborted by another process before it was complete"
                ) from None

    def _mark(self, path: str) -> str | None:
        """The upload that made the present object."""
        try:
            found: str | None = self._call("head_object", path).get("Metadata", {}).get(_WRITE)
        except IntegrityError:
            return None
        return found

    def _uploads(self, folder: str, prefix: str) -> Iterator[tuple[str, str]]:
        try:
            for page in self._pages("list_multipart_uploads", folder, Prefix=prefix):
                for item in page.get("Uploads", ()):
                    yield item["Key"], item["UploadId"]
        except ElasticError as error:
            # A separate permission that may not be granted; a lifecycle rule of the bucket removes the remains then.
            logger.info("unfinished uploads cannot be listed: %s", error)

    # --- requests ---

    def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        names = {"Objects": [{"Key": self._key(path)} for path in paths], "Quiet": True}

        def delete(limits: dict[str, Any]) -> None:
            answer = self._fs.call_s3("delete_objects", Bucket=self._bucket, Delete=names, **limits)
            for error in answer.get("Errors", ()):
                kind = PermissionError if error.get("Code") == "AccessDenied" else OSError
                raise kind(f"{error.get('Key')} is not deleted: {error.get('Code')}: {error.get('Message')}")

        self._tried(paths[0], delete)

    def _pages(self, method: str, folder: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        follow = {"list_objects_v2": _next_objects, "list_multipart_uploads": _next_uploads}[method]
        going: dict[str, Any] | None = {}
        while going is not None:
            ask = functools.partial(self._fs.call_s3, method, Bucket=self._bucket, **arguments, **going)
            page: dict[str, Any] = self._tried(folder, functools.partial(_with, ask))
            yield page
            going = follow(page)

    def _call(self, method: str, path: str, *, writing: bool = False, **arguments: Any) -> dict[str, Any]:
        return self._tried(path, lambda limits: self._request(method, path, limits, **arguments), writing=writing)

    def _request(self, method: str, path: str, limits: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        answer = self._fs.call_s3(method, Bucket=self._bucket, Key=self._key(path), **arguments, **limits)
        return dict(answer)

    def _key(self, path: str) -> str:
        self._at(path.rstrip("/"))
        return f"{self._prefix}{path}"


def _with(ask: Callable[..., dict[str, Any]], limits: dict[str, Any]) -> dict[str, Any]:
    return ask(**limits)


def _next_objects(page: dict[str, Any]) -> dict[str, Any] | None:
    return {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else None


def _next_uploads(page: dict[str, Any]) -> dict[str, Any] | None:
    if not page.get("IsTruncated"):
        return None
    return {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _parts(chunks: Iterable[Chunk], part_bytes: int) -> Iterator[bytes]:
    """The same bytes in parts of exactly `part_bytes`, except for the last."""
    held, size = [], 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
        while len(view):
            take = view[: part_bytes - size]
            held.append(take)
            size += len(take)
            view = view[len(take) :]
            if size == part_bytes:
                yield b"".join(held)
                held, size = [], 0
    if size:
        yield b"".join(held)

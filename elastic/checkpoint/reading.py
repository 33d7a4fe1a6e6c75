"""Byte ranges of shard files: checked against the manifest, joined where they touch, split where they are long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from elastic.checkpoint.shards import DTYPE_NAMES, bytes_of
from elastic.checkpoint.source import ReadRange
from elastic.core.checkpoint.manifest import Manifest, StoredTensor
from elastic.core.errors import IntegrityError, Where
from elastic.store.objects import Objects

# The last ones should end together, though reads differ in length.
_JOBS_PER_THREAD = 8


@dataclass(frozen=True)
class Request:
    """One read: the bytes of `file` from `begin` on fill the views in order, or `rows` rows of them do, each `stride`
    behind the one before."""

    file: str
    begin: int
    views: tuple[memoryview, ...]
    rows: int = 1
    stride: int = 0

    @property
    def bytes(self) -> int:
        return sum(len(view) for view in self.views)

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.bytes // self.rows


def requests(
    manifest: Manifest, ranges: Sequence[ReadRange], *, max_bytes: int, max_gap_bytes: int = 0, packs: bool = False
) -> list[Request]:
    """The reads that fill all targets. Raises IntegrityError for a range that is not in the manifest.

    `packs`: who reads can put rows together; else each is a read.

    Ranges at most `max_gap_bytes` apart in one file become one read (bytes between are read and dropped); no read is
    longer than `max_bytes`, so that long ones run in parallel.
    """
    shards = {shard.rank: shard for shard in manifest.shards}

    # Of a thousand ranks that have each a part of each tensor, a rank reads from few.
    @cache
    def stored(rank: int) -> Mapping[str, StoredTensor]:
        return {tensor.key: tensor for tensor in shards[rank].tensors} if rank in shards else {}

    wanted: list[tuple[str, int, memoryview]] = []
    packed: list[Request] = []
    for item in ranges:
        tensor = _find(stored(item.rank), item, manifest.id)
        size, file = item.target.element_size(), shards[item.rank].file
        begin, width, stride = tensor.begin + item.offset * size, item.numel * size, item.stride * size
        view = bytes_of(item.target)
        if packs and item.rows > 1 and 0 < width <= max_bytes:
            packed += _rows(Request(file, begin, (view,), item.rows, stride), max_bytes // width)
            continue
        for row in range(item.rows):
            for at in range(0, width, max_bytes):
                part = view[row * width + at : row * width + min(width, at + max_bytes)]
                wanted.append((file, begin + row * stride + at, part))
    return _joined(sorted(wanted, key=lambda part: part[:2]), max_bytes, max_gap_bytes) + packed


def _rows(whole: Request, count: int) -> Iterator[Request]:
    """In requests of at most so many rows."""
    (view,), width = whole.views, whole.width
    for row in range(0, whole.rows, count):
        rows = min(count, whole.rows - row)
        part = view[row * width : (row + rows) * width]
        yield replace(whole, begin=whole.begin + row * whole.stride, views=(part,), rows=rows)


def fetch(objects: Objects, folder: str, reads: Sequence[Request], threads: int) -> int:
    """Perform the reads, `threads` at once, from the files in `folder` ("" is the storage's top); returns the bytes."""
    if not reads:
        return 0
    # Columns of a matrix are a read for each of its rows, which by itself costs less than a job, or an open file.
    together = max(1, len(reads) // (threads * _JOBS_PER_THREAD))

    def perform(begin: int) -> None:
        for file, parts in groupby(reads[begin : begin + together], key=lambda read: read.file):
            objects.read_parts(f"{folder}/{file}" if folder else file, [(part.begin, part.views) for part in parts])

    with ThreadPoolExecutor(min(threads, len(reads)), "checkpoint-read") as pool:
        jobs = [pool.submit(perform, begin) for begin in range(0, len(reads), together)]
        try:
            for job in jobs:
                job.result()
        finally:
            # After the first error the remaining reads are cancelled.
            pool.shutdown(wait=True, cancel_futures=True)
    return sum(read.bytes for read in reads)


def _joined(wanted: Sequence[tuple[str, int, memoryview]], max_bytes: int, max_gap_bytes: int) -> list[Request]:
    joined: list[Request] = []
    views: list[memoryview] = []
    file, first, end = "", 0, 0
    for name, begin, view in wanted:
        near = name == file and 0 <= begin - end <= max_gap_bytes and begin + len(view) - first <= max_bytes
        if views and near:
            if begin > end:
                views.append(memoryview(bytearray(begin - end)))
        else:
            if views:
                joined.append(Request(file, first, tuple(views)))
            file, first, views = name, begin, []
        views.append(view)
        end = begin + len(view)
    return [*joined, Request(file, first, tuple(views))] if views else joined


def _find(stored: Mapping[str, StoredTensor], item: ReadRange, checkpoint_id: str) -> StoredTensor:
    where = Where(rank=item.rank)
    if item.key not in stored:
        raise IntegrityError(f"checkpoint {checkpoint_id} has no tensor {item.key!r} of that rank", where)
    tensor = stored[item.key]
    if DTYPE_NAMES.get(item.target.dtype) != tensor.dtype:
        raise IntegrityError(f"{item.key!r} is stored as {tensor.dtype}, not as {item.target.dtype}", where)
    numel = item.rows * item.numel
    if item.target.dim() != 1 or item.target.numel() != numel or not item.target.is_contiguous():
        raise IntegrityError(f"a target for {item.key!r} is not 1-D contiguous memory of {numel} elements", where)
    if item.rows > 1 and item.stride < item.numel:
        raise IntegrityError(f"rows of {item.numel} elements of {item.key!r} are {item.stride} apart", where)
    if item.offset < 0 or item.stop > tensor.numel:
        raise IntegrityError(f"{item.key!r} has {tensor.numel} elements, not [{item.offset}, {item.stop})", where)
    return tensor

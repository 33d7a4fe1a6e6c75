"""Byte ranges of shard files: checked against the manifest, joined where they touch, split where they are long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    """One read: the bytes of `file` from `begin` on fill the views in order."""

    file: str
    begin: int
    views: tuple[memoryview, ...]

    @property
    def bytes(self) -> int:
        return sum(len(view) for view in self.views)


def requests(
    manifest: Manifest, ranges: Sequence[ReadRange], *, max_bytes: int, max_gap_bytes: int = 0
) -> list[Request]:
    """The reads that fill all targets. Raises IntegrityError for a range that is not in the manifest.

    Ranges at most `max_gap_bytes` apart in one file become one read (bytes between are read and dropped); no read is
    longer than `max_bytes`, so that long ones run in parallel.
    """
    shards = {shard.rank: shard for shard in manifest.shards}

    # Of a thousand ranks that have each a part of each tensor, a rank reads from few.
    @cache
    def stored(rank: int) -> Mapping[str, StoredTensor]:
        return {tensor.key: tensor for tensor in shards[rank].tensors} if rank in shards else {}

    wanted: list[tuple[str, int, memoryview]] = []
    for item in ranges:
        tensor = _find(stored(item.rank), item, manifest.id)
        begin = tensor.begin + item.offset * item.target.element_size()
        view = bytes_of(item.target)
        for at in range(0, len(view), max_bytes):
            wanted.append((shards[item.rank].file, begin + at, view[at : at + max_bytes]))
    return _joined(sorted(wanted, key=lambda part: part[:2]), max_bytes, max_gap_bytes)


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
    if item.target.dim() != 1 or item.target.numel() != item.numel or not item.target.is_contiguous():
        raise IntegrityError(f"a target for {item.key!r} is not 1-D contiguous memory of {item.numel} elements", where)
    if item.offset < 0 or item.offset + item.numel > tensor.numel:
        stop = item.offset + item.numel
        raise IntegrityError(f"{item.key!r} has {tensor.numel} elements, not [{item.offset}, {stop})", where)
    return tensor

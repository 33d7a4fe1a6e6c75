"""Reading a snapshot back from the nodes that hold it: the memory tier as a `CheckpointSource`."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from zlib import crc32

from elastic.checkpoint.memory.messages import Leased, LeaseShard, ReadShard, Release, from_json, request_to_json
from elastic.checkpoint.memory.segments import packed
from elastic.checkpoint.reading import Request, requests
from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import IntegrityError, StorageError, Where
from elastic.transport.channel import MAX_PARTS, Channel, checked, split_views
from elastic.transport.handshake import CONNECT_LIMIT_S, Address, connect

# One stream does not fill a fast network: more bytes than this from one holder use several streams.
_STREAM_BYTES = 64 << 20
_STREAMS = 4
# How often a read calls `check`.
_LOOK_S = 0.1


@dataclass(frozen=True)
class Holder:
    """Where a shard is read from. `local_name` is set if that is the reader's own node."""

    address: Address
    local_name: str | None = None

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"


def nearest(copies: Sequence[Address], own: Address, local_name: str, rank: int) -> Holder:
    """Where a reader on the node `own` (`local_name` to its own workers) reads the shard of `rank` from.

    Its own node is asked wherever that has a copy. All other readers of a shard are spread over its copies.
    """
    if own in copies:
        return Holder(own, local_name)
    # crc32 and not hash(): a restore that is tried again in another process reads alike.
    return Holder(copies[crc32(f"{own}{rank}".encode()) % len(copies)])


class MemorySource:
    """`holders[rank]` is where that rank's shard is read from; `manifest` returns the manifest of an id.

    A holder counts as gone if it sends no byte for `timeout_s`, and a `read` fails if no holder sends one for
    `limit_s`; the duration is not limited while bytes arrive. During a read `check` is called, which may raise, and
    `moved` with the number of bytes received since its last call.
    """

    name = "memory"

    def __init__(
        self,
        manifest: Callable[[str], Manifest],
        holders: Mapping[int, Holder],
        token: bytes,
        *,
        timeout_s: float,
        limit_s: float = math.inf,
        check: Callable[[], None] = lambda: None,
        moved: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._manifest = manifest
        self._holders = holders
        self._token = token
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._check = check
        self._moved = moved

    def manifest(self, checkpoint_id: str) -> Manifest:
        return self._manifest(checkpoint_id)

    def read(self, manifest: Manifest, ranges: Sequence[ReadRange]) -> BytesRead:
        """Fill every target; returns the bytes fetched, by where they came from.

        Raises IntegrityError when a holder no longer has its shard or a range is not in it, and StorageError naming
        the holder when it cannot be reached or does not deliver in time.
        """
        ranks = {shard.file: shard.rank for shard in manifest.shards}
        wanted = requests(manifest, ranges, max_bytes=_STREAM_BYTES, packs=True)
        by_rank: dict[int, list[Request]] = {}
        for request in wanted:
            by_rank.setdefault(ranks[request.file], []).append(request)
        fetches = [
            _Fetch(self._holder(rank, manifest), self._token, manifest, rank, part)
            for rank, own in by_rank.items()
            for part in _split_requests(own)
        ]
        if fetches:
            self._run(fetches)
        local = sum(fetch.bytes for fetch in fetches if fetch.holder.local_name is not None)
        return BytesRead(own_node=local, network=sum(fetch.bytes for fetch in fetches) - local)

    def _holder(self, rank: int, manifest: Manifest) -> Holder:
        if rank not in self._holders:
            where = Where(rank=rank, step=manifest.step, generation=manifest.generation)
            raise IntegrityError("no node is known to hold that rank's shard in memory", where)
        return self._holders[rank]

    def _run(self, fetches: Sequence[_Fetch]) -> None:
        with ThreadPoolExecutor(max_workers=min(len(fetches), 16), thread_name_prefix="snapshot read") as pool:
            futures = {pool.submit(fetch.run, self._timeout_s): fetch for fetch in fetches}
            try:
                self._await(futures)
            finally:
                # Leaving the pool waits for all threads: none may write into the targets after this returns.
                for future, fetch in futures.items():
                    if not future.done():
                        future.cancel()
                        fetch.cancel()

    def _await(self, futures: Mapping[Future[None], _Fetch]) -> None:
        deadline, before = time.monotonic() + self._limit_s, 0
        late = set(futures)
        while late:
            done, late = wait(late, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in done:
                    future.result()
            self._check()
            moved = sum(fetch.moved for fetch in futures.values())
            if moved > before:
                self._moved(moved - before)
                deadline, before = time.monotonic() + self._limit_s, moved
            if late and time.monotonic() > deadline:
                fetch = futures[next(iter(late))]
                what = f"{fetch.holder} has sent no byte of its part of a snapshot for {self._limit_s} s"
                raise StorageError(what, fetch.where)


class _Fetch:
    """Some reads of one shard, over one connection."""

    def __init__(
        self, holder: Holder, token: bytes, manifest: Manifest, rank: int, requests: Sequence[Request]
    ) -> None:
        self.holder = holder
        self._token = token
        self._shard = (manifest.generation, manifest.step, rank)
        self.where = Where(rank=rank, step=manifest.step, generation=manifest.generation)
        self._requests = requests
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._cancelled = False
        self._copied = 0

    @property
    def bytes(self) -> int:
        return sum(request.bytes for request in self._requests)

    @property
    def moved(self) -> int:
        """Bytes so far; from any thread."""
        channel = self._channel
        return self._copied + (channel.received_bytes if channel is not None else 0)

    def run(self, timeout_s: float) -> None:
        try:
            limit_s = min(CONNECT_LIMIT_S, timeout_s)
            channel = connect(self.holder.local_name or self.holder.address, self._token, limit_s=limit_s)
            try:
                with self._lock:
                    self._channel = channel
                    if self._cancelled:
                        channel.shut()
                channel.limit(timeout_s)
                if self.holder.local_name is not None:
                    self._copy(channel)
                else:
                    self._receive(channel)
            finally:
                with self._lock:
                    self._copied = self.moved
                    self._channel = None
                channel.close()
        except OSError as error:
            raise StorageError(
                f"{self.holder} could not deliver its part of a snapshot: {error}", self.where
            ) from error

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._channel is not None:
                self._channel.shut()

    def _receive(self, channel: Channel) -> None:
        parts = tuple((each.begin, each.width, each.rows, each.stride) for each in self._requests)
        channel.ask(request_to_json(ReadShard(*self._shard, parts)))
        channel.recv_into([view for request in self._requests for view in request.views])
        channel.ask(request_to_json(Release()))

    def _copy(self, channel: Channel) -> None:
        channel.send(request_to_json(LeaseShard(*self._shard)))
        answer, fd = channel.receive()
        if fd is None:
            checked(answer["answer"])
            raise ConnectionError("the server gave no memory to read")
        try:
            from_json(answer["answer"], Leased)
            for request in self._requests:
                if request.rows == 1:
                    _read_at(fd, request)
                else:
                    _read_rows(fd, request)
                self._copied += request.bytes
        finally:
            os.close(fd)
        channel.send(request_to_json(Release()))
        checked(channel.receive()[0]["answer"])


def _read_at(fd: int, request: Request) -> None:
    begin, pending = request.begin, list(request.views)
    while pending:
        count = os.preadv(fd, pending[:MAX_PARTS], begin)
        if not count:
            raise IntegrityError(f"a shard in memory ends before byte {begin}, which its record says it has")
        begin, pending = begin + count, split_views(pending, count)[1]


def _read_rows(fd: int, request: Request) -> None:
    (target,) = request.views
    begin, end = request.begin, request.begin + (request.rows - 1) * request.stride + request.width
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(fd, end - first, prot=mmap.PROT_READ, offset=first)
    except ValueError as error:
        raise IntegrityError(f"a shard in memory ends before byte {end}, which its record says it has") from error
    with mapped, memoryview(mapped) as memory:
        done = 0
        for part in packed(memory, begin - first, request.width, request.rows, request.stride):
            target[done : done + len(part)] = part
            done += len(part)


def _split_requests(requests: Sequence[Request]) -> list[list[Request]]:
    """Parts of about equal size, each large enough for a connection of its own."""
    count = min(_STREAMS, len(requests), 1 + sum(request.bytes for request in requests) // _STREAM_BYTES)
    parts: list[list[Request]] = [[] for _ in range(count)]
    for number, request in enumerate(requests):
        parts[number * count // len(requests)].append(request)
    return parts

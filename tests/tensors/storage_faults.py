"""Storage that fails on purpose, at a chosen operation, for tests and rehearsals. Never in the path of a real run."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

from elastic.store.errors import translated
from elastic.store.objects import Chunk, Objects


class Fault(Enum):
    """What goes wrong. FAIL and DISK_FULL are raised half-way through; the other two are not noticed by the caller."""

    FAIL = "input/output error"
    DISK_FULL = "no space left on device"
    TRUNCATE = "the last byte is lost"
    FLIP = "one bit is flipped"


# Called with the operation's name, its number (1, 2, ... for each name) and the path.
Decide = Callable[[str, int, str], "Fault | None"]


def at(operation: str, number: int, fault: Fault) -> Decide:
    """Only the nth call of that operation goes wrong."""
    return lambda name, count, path: fault if (name, count) == (operation, number) else None


class FaultyObjects:
    """`Objects` that behave as `inner` does, except where `decide` names a fault."""

    def __init__(self, inner: Objects, decide: Decide = lambda operation, number, path: None) -> None:
        self.inner = inner
        self.decide = decide
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        self.inner.put(path, _spoilt(chunks, self._fault("put", path)))

    def create(self, path: str, data: bytes) -> None:
        fault = self._fault("create", path)
        with translated(path, writing=True):
            self.inner.create(path, b"".join(bytes(chunk) for chunk in _spoilt([data], fault)))

    def get(self, path: str) -> bytes:
        fault = self._fault("get", path)
        with translated(path):
            return b"".join(bytes(chunk) for chunk in _spoilt([self.inner.get(path)], fault))

    def read_parts(self, path: str, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        for begin, views in parts:
            self.read_into(path, begin, views)

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        fault = self._fault("read_into", path)
        with translated(path):
            _raise(fault)
        if fault is Fault.TRUNCATE:
            begin += 1 << 62  # behind the end of any file, so that the inner storage runs short by itself
        self.inner.read_into(path, begin, views)
        if fault is Fault.FLIP:
            first = next(view for view in views if len(view))
            first[0] ^= 1

    def names(self, folder: str) -> list[str]:
        fault = self._fault("names", folder)
        with translated(folder):
            _raise(fault)
        return self.inner.names(folder)

    def sizes(self, folder: str, *, unfinished: bool = False) -> dict[str, int]:
        fault = self._fault("sizes", folder)
        with translated(folder):
            _raise(fault)
        return self.inner.sizes(folder, unfinished=unfinished)

    def remove(self, paths: Sequence[str]) -> None:
        fault = self._fault("remove", paths[0] if paths else "")
        with translated("removal"):
            _raise(fault)
        self.inner.remove(paths)

    def _fault(self, operation: str, path: str) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            return self.decide(operation, self.calls[operation], path)


def _spoilt(chunks: Iterable[Chunk], fault: Fault | None) -> Iterator[Chunk]:
    """The chunks with the fault in the first one that is not empty."""
    spoilt = fault is None
    for chunk in chunks:
        if spoilt or not len(chunk):
            yield chunk
            continue
        spoilt = True
        if fault is Fault.TRUNCATE:
            yield memoryview(chunk)[:-1]
        elif fault is Fault.FLIP:
            damaged = bytearray(chunk)
            damaged[len(damaged) // 2] ^= 1
            yield damaged
        else:
            yield memoryview(chunk)[: len(chunk) // 2]
            _raise(fault)


def _raise(fault: Fault | None) -> None:
    if fault is Fault.FAIL:
        raise OSError(errno.EIO, fault.value)
    if fault is Fault.DISK_FULL:
        raise OSError(errno.ENOSPC, fault.value)

"""Objects in any remote fsspec storage, with retries of transient errors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from elastic.core.errors import IntegrityError, StorageError
from elastic.core.names import check_path
from elastic.store.errors import cut_off, translated
from elastic.store.objects import TIMEOUT_S, Chunk

logger = logging.getLogger(__name__)

# Objects up to this size are one request, which can be repeated.
_WHOLE_BYTES = 8 << 20
_TRIES = 5
_FIRST_PAUSE_S = 0.2
_T = TypeVar("_T")


class RemoteObjects:
    """`Objects` by fsspec's own methods. A PUT is atomic on object stores, so there is no temporary name.

    All requests are idempotent: one that fails is repeated up to four times with growing pauses, within `timeout_s` for
    all attempts together.
    """

    def __init__(
        self,
        fs: Any,
        root: str,
        timeout_s: float = TIMEOUT_S,
        *,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._timeout_s = timeout_s
        self._pause = pause
        self._clock = clock

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        with translated(path, writing=True):
            head, rest = _split(chunks, _WHOLE_BYTES)
            if rest is None:
                self._tried(path, lambda limits: self._fs.pipe_file(self._at(path), head, **limits), writing=True)
            else:
                self._stream(path, itertools.chain([head], rest))

    def create(self, path: str, data: bytes) -> None:
        try:
            self._tried(path, lambda limits: self._create(path, data, limits), writing=True)
        except IntegrityError:
            # It is ours from an attempt whose answer was lost, or another writer's.
            if self.get(path) != data:
                raise

    def get(self, path: str) -> bytes:
        return self._tried(path, lambda limits: bytes(self._fs.cat_file(self._at(path), **limits)))

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        total = sum(len(view) for view in views)
        data = self._tried(path, lambda limits: self._range(path, begin, begin + total, limits))
        if len(data) != total:
            raise cut_off(path, begin + total, begin + len(data))
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)

    def read_parts(self, path: str, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        for begin, views in parts:
            self.read_into(path, begin, views)

    def names(self, folder: str) -> list[str]:
        def listed(limits: dict[str, Any]) -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(path) for path in self._fs.ls(self._at(folder), detail=False, **limits)]
            except FileNotFoundError:
                return []

        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in self._tried(folder, listed))

    def sizes(self, folder: str, *, unfinished: bool = False) -> dict[str, int]:
        def found(limits: dict[str, Any]) -> dict[str, Any]:
            # Many drivers cache listings, and other processes write here too.
            self._fs.invalidate_cache()
            try:
                return dict(self._fs.find(self._at(folder), detail=True, **limits))
            except FileNotFoundError:
                return {}

        prefix = self._at("")
        paths = self._tried(folder, found).items()
        return {path[len(prefix) :]: int(info["size"]) for path, info in paths if path.startswith(prefix)}

    def remove(self, paths: Sequence[str]) -> None:
        for path in map(check_path, paths):
            with contextlib.suppress(IntegrityError):
                self._tried(path, functools.partial(self._remove, path))

    def _stream(self, path: str, chunks: Iterable[Chunk]) -> None:
        """By the driver's own file object, with the driver's retries and limits."""
        file = self._fs.open(self._at(path), "wb")
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            _discard(file)
            raise
        file.close()

    def _remove(self, path: str, limits: dict[str, Any]) -> None:
        self._fs.rm_file(self._at(path), **limits)

    def _create(self, path: str, data: bytes, limits: dict[str, Any]) -> None:
        self._fs.pipe_file(self._at(path), data, mode="create", **limits)

    def _range(self, path: str, begin: int, end: int, limits: dict[str, Any]) -> memoryview:
        try:
            return memoryview(self._fs.cat_file(self._at(path), start=begin, end=end, **limits))
        except FileNotFoundError:
            raise
        except Exception:
            # Many stores answer a range after the end with an error of their own. The object is damaged then, and a
            # retry does not help.
            size = self._size(path)
            if size is not None and size < end:
                raise cut_off(path, end, size) from None
            raise

    def _size(self, path: str) -> int | None:
        try:
            return int(self._fs.info(self._at(path))["size"])
        except Exception:  # noqa: BLE001 - only asked to explain another error, which is raised all the same
            return None

    def _tried(self, path: str, ask: Callable[[dict[str, Any]], _T], *, writing: bool = False) -> _T:
        """Call `ask` with retries; it gets the options that bound its time, where the driver knows any."""
        until = self._clock() + self._timeout_s
        for number in range(1, _TRIES + 1):
            try:
                with translated(path, writing=writing):
                    return ask(self._limits(until))
            except StorageError as error:
                # With jitter, so that a thousand ranks that were throttled do not come back together.
                pause_s = _FIRST_PAUSE_S * 2.0 ** (number - 1) * random.uniform(0.5, 1.5)
                if number == _TRIES or self._clock() + pause_s >= until:
                    raise
                logger.debug("retrying in %.1f s: %s", pause_s, error)
                self._pause(pause_s)
        raise AssertionError("the last attempt has returned or raised")

    def _limits(self, until: float) -> dict[str, Any]:
        # fsspec removes it from the arguments of every method of an asynchronous driver; others cannot be interrupted.
        return {"timeout": max(0.001, until - self._clock())} if getattr(self._fs, "async_impl", False) else {}

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"


def _split(chunks: Iterable[Chunk], most_bytes: int) -> tuple[bytes, Iterator[Chunk] | None]:
    """All bytes and None; or a first part of more than `most_bytes`, and the rest."""
    source, held, size = iter(chunks), [], 0
    for chunk in source:
        held.append(bytes(chunk))
        size += len(chunk)
        if size > most_bytes:
            return b"".join(held), source
    return b"".join(held), None


def _discard(file: Any) -> None:
    """Not close(), which would write the unfinished object under its final name."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        # Otherwise its finalizer closes it. Files without a settable attribute have nothing to commit.
        file.closed = True

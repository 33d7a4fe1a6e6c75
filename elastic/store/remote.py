"""Objects in any fsspec storage that is no disk of this machine, tried again where a network may have hiccuped."""

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

# What is no longer than this is one request, which can be repeated.
_WHOLE_BYTES = 8 << 20
_TRIES = 5
_FIRST_PAUSE_S = 0.2
_T = TypeVar("_T")


class RemoteObjects:
    """`Objects` by fsspec's own methods. A PUT is atomic on object stores, so there is no temporary name.

    Nothing that one of its requests asks for is changed by asking again: so a request that fails, or is not answered
    within `timeout_s`, is repeated up to four times with growing pauses, as long as all of it stays within `timeout_s`.
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
            # Ours already, of a try whose answer was lost, or taken.
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
            # Listings are cached by many drivers, and other processes write here too.
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
        """By the driver's own file object, whose tries and limits are the driver's."""
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
            # Many stores answer a range behind the end with an error of their own: that is a damaged object, and
            # asking again would not help.
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
        """What `ask` returns; it is given the options that bound its time, where the driver knows any."""
        until = self._clock() + self._timeout_s
        for number in range(1, _TRIES + 1):
            try:
                with translated(path, writing=writing):
                    return ask(self._limits(until))
            except StorageError as error:
                # Spread, so that a thousand ranks that were told to slow down do not come back together.
                pause_s = _FIRST_PAUSE_S * 2.0 ** (number - 1) * random.uniform(0.5, 1.5)
                if number == _TRIES or self._clock() + pause_s >= until:
                    raise
                logger.debug("asking again in %.1f s: %s", pause_s, error)
                self._pause(pause_s)
        raise AssertionError("the last try has returned or raised")

    def _limits(self, until: float) -> dict[str, Any]:
        # fsspec takes it out of the arguments of every method of an asynchronous driver; others cannot be interrupted.
        return {"timeout": max(0.001, until - self._clock())} if getattr(self._fs, "async_impl", False) else {}

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"


def _split(chunks: Iterable[Chunk], most_bytes: int) -> tuple[bytes, Iterator[Chunk] | None]:
    """All of it and None; or the first part, of more than so many bytes, and what comes after."""
    source, held, size = iter(chunks), [], 0
    for chunk in source:
        held.append(bytes(chunk))
        size += len(chunk)
        if size > most_bytes:
            return b"".join(held), source
    return b"".join(held), None


def _discard(file: Any) -> None:
    """Not close(), which would write what there is so far under the final name."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        # Or its finalizer closes it. Files that do not let themselves be marked have nothing to commit.
        file.closed = True

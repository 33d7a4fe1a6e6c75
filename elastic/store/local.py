"""Objects as files: a folder of this machine, or of a shared file system mounted on it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence

from elastic.core.errors import IntegrityError
from elastic.core.names import check_path
from elastic.store.errors import cut_off, translated
from elastic.store.objects import Chunk

_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp$")


class LocalObjects:
    """`Objects` below a folder. A file is written under a temporary name, synced and renamed."""

    def __init__(self, root: str) -> None:
        self._root = root

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        with translated(path, writing=True), self._temporary(path, chunks) as (temporary, final):
            os.replace(temporary, final)
            _sync_folder(os.path.dirname(final))

    def create(self, path: str, data: bytes) -> None:
        try:
            with translated(path, writing=True), self._temporary(path, [data]) as (temporary, final):
                _link_new(temporary, final)
                _sync_folder(os.path.dirname(final))
        except IntegrityError:
            # It is ours from an attempt whose answer was lost, or another writer's.
            if self.get(path) != data:
                raise

    def get(self, path: str) -> bytes:
        with translated(path), open(self._at(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        self.read_parts(path, [(begin, views)])

    def read_parts(self, path: str, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        with translated(path), open(self._at(path), "rb", buffering=0) as file:
            for begin, views in parts:
                for batch in _batches(views):
                    begin += _read_batch(file.fileno(), path, begin, batch)

    def names(self, folder: str) -> list[str]:
        with translated(folder):
            try:
                return sorted(os.listdir(self._at(folder)))
            except FileNotFoundError:
                return []

    def sizes(self, folder: str, *, unfinished: bool = False) -> dict[str, int]:
        found: dict[str, int] = {}
        with translated(folder):
            top = self._at(folder)
            if os.path.isdir(top):
                os.listdir(top)  # os.walk() takes an unreadable folder for an empty one
            for place, _, files in os.walk(top):
                for file in files:
                    if _TEMPORARY.search(file) and not unfinished:
                        continue
                    # A file may disappear meanwhile: another process may be deleting an old checkpoint.
                    with contextlib.suppress(FileNotFoundError):
                        relative = os.path.relpath(os.path.join(place, file), self._root).replace(os.sep, "/")
                        found[relative] = os.path.getsize(os.path.join(place, file))
        return found

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with translated(path), contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(path))
        for folder in {os.path.dirname(self._at(path)) for path in paths}:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)

    def _at(self, path: str) -> str:
        """Where an object lies. Raises IntegrityError where that is not below the root, by ".." or a symbolic link."""
        return path_below(self._root, path)

    @contextlib.contextmanager
    def _temporary(self, path: str, chunks: Iterable[Chunk]) -> Iterator[tuple[str, str]]:
        """A complete, synced file next to its final name; removed at the end if it was not renamed."""
        final = self._at(path)
        _make_folder(os.path.dirname(final))
        temporary = f"{final}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb", buffering=0) as file:
                for chunk in chunks:
                    _write_all(file.fileno(), memoryview(chunk))
                os.fsync(file.fileno())
            yield temporary, final
        finally:
            # On a full disk this frees the space at once.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def path_below(root: str, path: str) -> str:
    """Where `path` lies below the folder `root`. Raises IntegrityError where it leads elsewhere, by ".." or a link.

    Other users may be able to write to a shared storage: a symbolic link in it must not choose which file is written.
    """
    check_path(path)
    at = os.path.join(root, *path.split("/"))
    top, real = os.path.realpath(root), os.path.realpath(at)
    if os.path.commonpath([top, real]) != top:
        raise IntegrityError(f"{path} leads out of the storage by a symbolic link; remove the link")
    return at


def _batches(views: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    for first in range(0, len(views), 512):  # a system call takes 1,024 at most
        yield views[first : first + 512]


def _read_batch(descriptor: int, path: str, begin: int, views: Sequence[memoryview]) -> int:
    """Fill the views; a system call may return less than requested, and does above 2 GiB."""
    total = sum(len(view) for view in views)
    done = 0
    left = [view for view in views if len(view)]
    while left:
        count = os.preadv(descriptor, left, begin + done)
        if count == 0:
            raise cut_off(path, begin + total, begin + done)
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return total


def _write_all(descriptor: int, chunk: memoryview) -> None:
    rest = chunk.cast("B") if chunk.nbytes else chunk[:0]
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def _link_new(temporary: str, final: str) -> None:
    """Give a file its final name unless the name exists."""
    try:
        os.link(temporary, final)  # unlike a rename, it fails when the name exists
    except FileExistsError:
        raise
    except OSError:
        # Some mounted file systems have no links. There, only two concurrent callers go unnoticed.
        if os.path.exists(final):
            raise FileExistsError(errno.EEXIST, "exists already", final) from None
        os.replace(temporary, final)


def _make_folder(folder: str) -> None:
    """Create it and its parents durably: a synced file is lost with a folder that a crash forgets."""
    missing = []
    at = folder
    while at and not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        # For the caller, FileExistsError means that the object exists.
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", folder) from error
    for made in reversed(missing):
        _sync_folder(os.path.dirname(made) or ".")


def _sync_folder(folder: str) -> None:
    """Make a rename durable. File systems that do not offer it do not need it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

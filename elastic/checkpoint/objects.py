"""Named byte strings in storage: the few things a checkpoint needs of a file system or an object store.

All errors of fsspec, its drivers and the operating system become ours here and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.core.errors import ElasticError, IntegrityError, StorageError, UsageError

Chunk = bytes | bytearray | memoryview


class Objects(Protocol):
    """Paths are relative, with "/" between parts. Every method may be called from any thread.

    Raises IntegrityError where an object is missing or too short, UsageError where the address or the permissions must
    be changed, and StorageError for all else.
    """

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write an object, or replace it. It is durable when this returns; a reader sees all of it or none."""
        ...

    def create(self, path: str, data: bytes) -> None:
        """As `put`, but raises IntegrityError when the object exists. On stores without a conditional write, two
        callers at the same moment may both succeed."""
        ...

    def get(self, path: str) -> bytes: ...

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, with the bytes from `begin` on."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Path and size in bytes of every object below a folder; empty when there is no such folder."""
        ...

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, and folders left empty. What does not exist is not an error."""
        ...


def open_objects(url: str) -> Objects:
    """The objects below any fsspec URL or a plain local path."""
    try:
        fs, root = fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot use {url!r} as storage: {error}") from error
    except Exception as error:
        raise StorageError(f"cannot open storage {url!r}: {error}") from error
    return LocalObjects(root) if isinstance(fs, LocalFileSystem) else RemoteObjects(fs, root)


class LocalObjects:
    """A folder of this machine, or of a shared file system mounted on it."""

    def __init__(self, root: str) -> None:
        self._root = root

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        with translated(path, writing=True), self._temporary(path, chunks) as (temporary, final):
            os.replace(temporary, final)
            _sync_folder(os.path.dirname(final))

    def create(self, path: str, data: bytes) -> None:
        with translated(path, writing=True), self._temporary(path, [data]) as (temporary, final):
            _link_new(temporary, final)
            _sync_folder(os.path.dirname(final))

    def get(self, path: str) -> bytes:
        with translated(path), open(self._at(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        with translated(path), open(self._at(path), "rb", buffering=0) as file:
            for batch in _batches(views):
                begin += _read_batch(file.fileno(), path, begin, batch)

    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with translated(folder):
            top = self._at(folder)
            if os.path.isdir(top):
                os.listdir(top)  # os.walk() would take an unreadable folder for an empty one
            for place, _, files in os.walk(top):
                for file in files:
                    # A file may go away while we look: another process may be deleting an old checkpoint.
                    with contextlib.suppress(FileNotFoundError):
                        relative = os.path.relpath(os.path.join(place, file), self._root).replace(os.sep, "/")
                        found[relative] = os.path.getsize(os.path.join(place, file))
        return found

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with translated(path), contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(path))
        for folder in {os.path.dirname(self._at(path)) for path in paths}:
            with contextlib.suppress(OSError):  # not empty: then it stays
                os.rmdir(folder)

    def _at(self, path: str) -> str:
        return os.path.join(self._root, *path.split("/"))

    @contextlib.contextmanager
    def _temporary(self, path: str, chunks: Iterable[Chunk]) -> Iterator[tuple[str, str]]:
        """A complete, synced file beside its final name; removed at the end if it still has its temporary name."""
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
            # Also frees the space at once when the disk is full.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


class RemoteObjects:
    """Any other fsspec file system. A PUT is atomic on object stores, so there is no temporary name."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        with translated(path, writing=True), self._fs.open(self._at(path), "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def create(self, path: str, data: bytes) -> None:
        with translated(path, writing=True):
            self._fs.pipe_file(self._at(path), data, mode="create")

    def get(self, path: str) -> bytes:
        with translated(path):
            return bytes(self._fs.cat_file(self._at(path)))

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        total = sum(len(view) for view in views)
        try:
            with translated(path):
                data = memoryview(self._fs.cat_file(self._at(path), start=begin, end=begin + total))
        except StorageError:
            # Many stores answer a range behind the end with an error of their own: that is a damaged object, and
            # asking again would not help.
            size = self._size(path)
            if size is not None and size < begin + total:
                raise _short(path, begin + total, size) from None
            raise
        if len(data) != total:
            raise _short(path, begin + total, begin + len(data))
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)

    def sizes(self, folder: str) -> dict[str, int]:
        with translated(folder):
            # Listings are cached by many drivers, and other processes write here too.
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._at(folder), detail=True)
            except FileNotFoundError:
                return {}
        prefix = self._at("")
        return {path[len(prefix) :]: int(info["size"]) for path, info in found.items() if path.startswith(prefix)}

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with translated(path), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(path))

    def _size(self, path: str) -> int | None:
        try:
            return int(self._fs.info(self._at(path))["size"])
        except Exception:  # noqa: BLE001 - only asked to explain another error, which is raised all the same
            return None

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextlib.contextmanager
def translated(path: str, *, writing: bool = False) -> Iterator[None]:
    """Foreign errors become ours. Writing, a missing folder is a fault of the storage; reading, of the checkpoint."""
    try:
        yield
    except ElasticError:
        raise
    except FileNotFoundError as error:
        if writing:  # a folder that went away, or a mount: worth another try
            raise StorageError(f"storage failed at {path}: {error}") from error
        raise IntegrityError(f"{path} is missing in storage") from error
    except FileExistsError as error:
        raise IntegrityError(f"{path} exists already in storage and is never replaced") from error
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise UsageError(f"storage does not allow access to {path}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"disk full: no space left to write {path}") from error
        raise StorageError(f"storage failed at {path}: {error}") from error
    except Exception as error:  # drivers raise errors of their own libraries
        raise StorageError(f"storage failed at {path}: {type(error).__name__}: {error}") from error


def _short(path: str, wanted: int, found: int) -> IntegrityError:
    return IntegrityError(f"{path} ends at byte {found}, but byte {wanted} is needed: it is cut off")


def _batches(views: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    for first in range(0, len(views), 512):  # a system call takes 1,024 at most
        yield views[first : first + 512]


def _read_batch(descriptor: int, path: str, begin: int, views: Sequence[memoryview]) -> int:
    """Fill the views; a system call may return less than was asked for, and does above 2 GiB."""
    total = sum(len(view) for view in views)
    done = 0
    left = [view for view in views if len(view)]
    while left:
        count = os.preadv(descriptor, left, begin + done)
        if count == 0:
            raise _short(path, begin + total, begin + done)
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
    """Give a file its final name unless that is taken."""
    try:
        os.link(temporary, final)  # unlike a rename, it fails when the name is taken
    except FileExistsError:
        raise
    except OSError:
        # Some mounted file systems have no links. Then only two callers at the same moment would go unnoticed.
        if os.path.exists(final):
            raise FileExistsError(errno.EEXIST, "exists already", final) from None
        os.replace(temporary, final)


def _make_folder(folder: str) -> None:
    """With the folders above it, all of them durable: a synced file in a folder that a crash forgets is lost too."""
    missing = []
    at = folder
    while at and not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    os.makedirs(folder, exist_ok=True)
    for made in reversed(missing):
        _sync_folder(os.path.dirname(made) or ".")


def _sync_folder(folder: str) -> None:
    """Makes a rename durable. Some file systems do not offer it, and then it is not needed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

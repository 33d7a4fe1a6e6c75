"""Where a journal's lines lie. One segment per controller incarnation, claimed exclusively, append only.

Local disks: one file `journal/000001.jsonl`, created with O_EXCL; every append is written, flushed and fsynced.
Object stores cannot append: `journal/000001/00000007.jsonl` is one object per append; object 0 is the claim.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.core.errors import Fenced, StorageError, UsageError
from elastic.core.names import check_run_id

_FILE = re.compile(r"(\d{6,})\.jsonl")
_FOLDER = re.compile(r"\d{6,}")


class Segments(Protocol):
    """All segments of one journal. 1. `claim` by a new controller; 2. `append` by it alone; the rest by any reader.

    Every method raises StorageError where the store cannot be reached; what was appended is durable on return.
    """

    def incarnations(self) -> list[int]:
        """Claimed so far, oldest first."""
        ...

    def claim(self, incarnation: int) -> None:
        """Raises Fenced when somebody has it already."""
        ...

    def append(self, incarnation: int, text: str) -> None:
        """`text` is whole lines. A failed append leaves nothing behind that a later one would build on."""
        ...

    def lines(self, incarnation: int) -> Iterator[str]:
        """With their line ends; a last line without one was torn."""
        ...


def open_segments(url: str, run_id: str) -> Segments:
    """The journal of `run_id` below `url` (any fsspec URL). Raises UsageError for a URL that no file system knows."""
    check_run_id(run_id)
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UsageError(f"storage {url!r} cannot be used: {error}") from error
    folder = f"{str(root).rstrip('/')}/{run_id}/journal"
    return LocalSegments(Path(folder)) if isinstance(fs, LocalFileSystem) else ObjectSegments(fs, folder)


class LocalSegments:
    """Segments as files of a local (or network) disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}
        self._good: dict[int, int] = {}

    def incarnations(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _storage(error, self._folder) from error
        return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))

    def claim(self, incarnation: int) -> None:
        path = self._path(incarnation)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[incarnation] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._good[incarnation] = 0
            _fsync_folder(self._folder)
        except FileExistsError as error:
            raise _taken(incarnation) from error
        except OSError as error:
            raise _storage(error, path) from error

    def append(self, incarnation: int, text: str) -> None:
        descriptor, good, data = self._open[incarnation], self._good[incarnation], text.encode()
        try:
            # Cuts off what an append that failed half way (a full disk) has left.
            os.ftruncate(descriptor, good)
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], good + written)
            os.fsync(descriptor)
        except OSError as error:
            raise _storage(error, self._path(incarnation)) from error
        self._good[incarnation] = good + len(data)

    def lines(self, incarnation: int) -> Iterator[str]:
        try:
            with open(self._path(incarnation), encoding="utf-8", errors="replace", newline="\n") as file:
                yield from file
        except FileNotFoundError:
            return
        except OSError as error:
            raise _storage(error, self._path(incarnation)) from error

    def _path(self, incarnation: int) -> Path:
        return self._folder / f"{incarnation:06d}.jsonl"


class ObjectSegments:
    """Segments as folders of an object store."""

    def __init__(self, fs: Any, folder: str) -> None:
        self._fs = fs
        self._folder = folder
        self._next: dict[int, int] = {}
        # Objects never change once written, so a reader that polls fetches each one once.
        self._seen: dict[str, str] = {}

    def incarnations(self) -> list[int]:
        names = (path.rsplit("/", 1)[-1] for path in self._list(self._folder))
        return sorted(int(name) for name in names if _FOLDER.fullmatch(name))

    def claim(self, incarnation: int) -> None:
        path = self._path(incarnation, 0)
        if incarnation in self.incarnations():
            raise _taken(incarnation)
        try:
            # "create" is atomic where the store can do it (S3 and GCS can).
            self._fs.pipe_file(path, b"", mode="create")
        except FileExistsError as error:
            raise _taken(incarnation) from error
        except OSError as error:
            raise _storage(error, path) from error
        self._next[incarnation] = 1

    def append(self, incarnation: int, text: str) -> None:
        path = self._path(incarnation, self._next[incarnation])
        try:
            # Overwriting is safe: nobody else writes in a claimed folder, and a retry writes the same place again.
            self._fs.pipe_file(path, text.encode())
        except OSError as error:
            raise _storage(error, path) from error
        self._next[incarnation] += 1

    def lines(self, incarnation: int) -> Iterator[str]:
        for path in sorted(self._list(f"{self._folder}/{incarnation:06d}")):
            if path not in self._seen:
                try:
                    self._seen[path] = self._fs.cat_file(path).decode("utf-8", errors="replace")
                except OSError as error:
                    raise _storage(error, path) from error
            yield from self._seen[path].splitlines(keepends=True)

    def _list(self, folder: str) -> list[str]:
        try:
            self._fs.invalidate_cache(folder)
            return [str(path) for path in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _storage(error, folder) from error

    def _path(self, incarnation: int, number: int) -> str:
        return f"{self._folder}/{incarnation:06d}/{number:08d}.jsonl"


def _taken(incarnation: int) -> Fenced:
    return Fenced(f"another controller already has incarnation {incarnation} of this run")


def _storage(error: OSError, path: object) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"the journal at {path} cannot be reached: {reason}")


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

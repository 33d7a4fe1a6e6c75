"""The storage of a journal's lines: one append-only segment per controller incarnation, claimed exclusively.

Local disks: one file `journal/000001.jsonl`, created with O_EXCL; every append is written, flushed and fsynced.
Object stores cannot append: there a segment is a folder of objects (`observe.object_segments`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastic.core.errors import Fenced, StorageError
from elastic.store.local import path_below

# Not \d, which matches the digits of every script.
_FILE = re.compile(r"([0-9]{6,18})\.jsonl")


@dataclass(frozen=True)
class Mark:
    """A place in a segment at which reading can begin: `lines` lines are before it."""

    place: int = 0
    lines: int = 0


START = Mark()


class Segments(Protocol):
    """All segments of one journal. 1. `claim` by a new controller; 2. `append` and `mark` by it alone; the rest by any
    reader.

    Every method raises StorageError when the store cannot be reached; appended lines are durable on return.
    """

    def incarnations(self) -> list[int]:
        """Claimed so far, oldest first."""
        ...

    def claim(self, incarnation: int) -> None:
        """Raises Fenced when the incarnation is taken."""
        ...

    def append(self, incarnation: int, text: str) -> None:
        """`text`: whole lines. After a failed append the next one begins with the same lines and may add more."""
        ...

    def mark(self, incarnation: int) -> Mark:
        """The last place of the claimed segment at which reading can begin. Sends no request."""
        ...

    def lines(self, incarnation: int, start: Mark = START) -> Iterator[str]:
        """From `start` on, with their line ends; a last line without one was torn."""
        ...


class LocalSegments:
    """Segments as files of a local (or network) disk."""

    def __init__(self, root: str, folder: str) -> None:
        """`folder` is a path below the storage `root`. Methods raise IntegrityError if a link leads out of it."""
        self._root, self._name = root, folder
        self._folder = Path(root) / folder
        self._open: dict[int, int] = {}
        # The end of the last complete append.
        self._good: dict[int, Mark] = {}

    def incarnations(self) -> list[int]:
        path_below(self._root, self._name)
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
            self._good[incarnation] = START
            _fsync_folder(self._folder)
        except FileExistsError as error:
            raise taken(incarnation) from error
        except OSError as error:
            raise _storage(error, path) from error

    def append(self, incarnation: int, text: str) -> None:
        descriptor, good, data = self._open[incarnation], self._good[incarnation], text.encode()
        try:
            # Removes the remains of an append that failed part of the way (a full disk).
            os.ftruncate(descriptor, good.place)
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], good.place + written)
            os.fsync(descriptor)
        except OSError as error:
            raise _storage(error, self._path(incarnation)) from error
        self._good[incarnation] = Mark(good.place + len(data), good.lines + text.count("\n"))

    def mark(self, incarnation: int) -> Mark:
        return self._good[incarnation]

    def lines(self, incarnation: int, start: Mark = START) -> Iterator[str]:
        try:
            with open(self._path(incarnation), "rb") as file:
                file.seek(start.place)
                yield from (line.decode(errors="replace") for line in file)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _storage(error, self._path(incarnation)) from error

    def _path(self, incarnation: int) -> Path:
        return Path(path_below(self._root, f"{self._name}/{incarnation:06d}.jsonl"))


def taken(incarnation: int) -> Fenced:
    """The error for the second claimant."""
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

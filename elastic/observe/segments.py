"""Where a journal's lines lie. One segment per controller incarnation, claimed exclusively, append only.

Local disks: one file `journal/000001.jsonl`, created with O_EXCL; every append is written, flushed and fsynced.
Object stores cannot append: `journal/000001/00000007.jsonl` is one object per append; object 0 is the claim.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from elastic.core.errors import Fenced, IntegrityError, StorageError, UsageError
from elastic.core.names import check_run_id
from elastic.store.address import local_root
from elastic.store.objects import TIMEOUT_S, Objects, open_objects

# Not \d, which takes the digits of every script.
_FILE = re.compile(r"([0-9]{6,18})\.jsonl")
_FOLDER = re.compile(r"[0-9]{6,18}")
_OBJECT = re.compile(r"[0-9]{8,18}\.jsonl")
_CLAIM = re.compile(r"claimed by [0-9a-f]{32}\n")
_READS_AT_ONCE = 16


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
        """`text` is whole lines. After a failed append the next one begins with the same lines, and may have more."""
        ...

    def lines(self, incarnation: int) -> Iterator[str]:
        """With their line ends; a last line without one was torn."""
        ...


def open_segments(url: str, run_id: str, timeout_s: float = TIMEOUT_S) -> Segments:
    """The journal of `run_id` below `url` (any fsspec URL). Raises UsageError for a URL that no file system knows.

    No request to a store elsewhere takes longer than `timeout_s`.
    """
    check_run_id(run_id)
    root = local_root(url)
    if root is not None:
        return LocalSegments(Path(root) / run_id / "journal")
    return ObjectSegments(open_objects(url, timeout_s), f"{run_id}/journal")


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
    """Segments as folders of an object store.

    A claim is object 0, made by a conditional write: of several claimants one gets it. Not every store that speaks S3
    heeds conditions, so each claimant also leaves an object of its own and looks who else has: of two that overlap,
    at least the one that looks last sees the other, and whoever sees another gives way. So no two ever have one
    incarnation, where a listing shows what was written before it was asked for.
    """

    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects = objects
        self._folder = folder
        self._next: dict[int, int] = {}
        # Of an append that failed: what was written of it, and what may have been, or may yet be.
        self._failed: dict[int, tuple[str, str]] = {}
        # Objects never change once written, so a reader that polls fetches each one once.
        self._seen: dict[str, str] = {}

    def incarnations(self) -> list[int]:
        return sorted(int(name) for name in self._names(self._folder) if _FOLDER.fullmatch(name))

    def claim(self, incarnation: int) -> None:
        folder, mark = self._of(incarnation), uuid.uuid4().hex
        if incarnation in self.incarnations():
            raise _taken(incarnation)
        try:
            with _reached(folder):
                # The mark makes a repetition of this very request another thing than a second claimant's.
                self._objects.create(f"{folder}/{_object(0)}", _claim_line(mark))
        except IntegrityError as error:
            raise _taken(incarnation) from error
        with _reached(folder):
            self._objects.put(f"{folder}/claim-{mark}", [])
        if any(name.startswith("claim-") and name != f"claim-{mark}" for name in self._names(folder)):
            raise _taken(incarnation)
        self._next[incarnation] = 1

    def append(self, incarnation: int, text: str) -> None:
        sent, unsure = self._failed.pop(incarnation, ("", ""))
        text = text.removeprefix(sent)
        # What may be there is written again, the same bytes at the same place: if it comes late, nothing changes.
        parts = [unsure, text.removeprefix(unsure)] if unsure and text.startswith(unsure) else [text]
        for part in filter(None, parts):
            path = f"{self._of(incarnation)}/{_object(self._next[incarnation])}"
            self._failed[incarnation] = (sent, part)
            with _reached(path):
                # Overwriting is safe: nobody else writes in a claimed folder.
                self._objects.put(path, [part.encode()])
            self._next[incarnation] += 1
            sent += part
        self._failed.pop(incarnation, None)

    def lines(self, incarnation: int) -> Iterator[str]:
        folder = self._of(incarnation)
        paths = [f"{folder}/{name}" for name in self._names(folder) if _OBJECT.fullmatch(name)]
        self._fetch([path for path in paths if path not in self._seen])
        for path in paths:
            yield from self._seen[path].splitlines(keepends=True)

    def _fetch(self, paths: Sequence[str]) -> None:
        # A run of weeks has many thousands of them, at some milliseconds each.
        with ThreadPoolExecutor(_READS_AT_ONCE, "journal-read") as pool, _reached(self._folder):
            for path, data in zip(paths, pool.map(self._objects.get, paths), strict=True):
                text = data.decode("utf-8", errors="replace")
                self._seen[path] = "" if _CLAIM.fullmatch(text) else text

    def _names(self, folder: str) -> list[str]:
        with _reached(folder):
            return self._objects.names(folder)

    def _of(self, incarnation: int) -> str:
        return f"{self._folder}/{incarnation:06d}"


def _object(number: int) -> str:
    return f"{number:08d}.jsonl"


def _claim_line(mark: str) -> bytes:
    return f"claimed by {mark}\n".encode()


@contextlib.contextmanager
def _reached(path: str) -> Iterator[None]:
    """A journal that may not be written is one that cannot be reached: rights are mended while training goes on."""
    try:
        yield
    except (StorageError, UsageError) as error:
        raise StorageError(f"the journal at {path} cannot be reached: {error.message}") from error


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

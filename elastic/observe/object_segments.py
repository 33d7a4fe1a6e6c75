"""A journal's segments in an object store, which cannot append.

    journal/000001/00000000.jsonl             the claim
                   claim-<random>             who claimed
                   00000001-00000512.jsonl    appends that were joined
                   00000513.jsonl             one append

Objects never change. A single object whose number is covered by a joined one does not count, even if it arrives late.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from elastic.core.errors import ElasticError, IntegrityError, StorageError, UsageError
from elastic.observe.segments import START, Mark, taken
from elastic.store.objects import Objects

logger = logging.getLogger(__name__)

# Not \d, which matches the digits of every script.
_FOLDER = re.compile(r"[0-9]{6,18}")
_OBJECT = re.compile(r"([0-9]{8,18})(?:-([0-9]{8,18}))?\.jsonl")
_CLAIM = re.compile(r"claimed by [0-9a-f]{32}\n")
_READS_AT_ONCE = 16
# A run of a month makes a million appends; reading that many objects would take too long.
JOINED = 512


class ObjectSegments:
    """`Segments` as folders of objects.

    A claim is object 0, created by a conditional write: of several claimants one succeeds. Not every S3-compatible
    store honours conditions, so each claimant also writes an object of its own and lists the others: of two concurrent
    claimants, at least the one that lists last sees the other, and a claimant that sees another one gives up. So no two
    have the same incarnation, provided that listings are consistent.
    """

    def __init__(self, objects: Objects, folder: str, joined: int = JOINED) -> None:
        self._objects = objects
        self._folder = folder
        self._joined = joined
        self._next: dict[int, int] = {}
        # For a failed append: the text that was written, and the text that may have been written or may yet be.
        self._failed: dict[int, tuple[str, str]] = {}
        # The number of the first append that is not joined yet, and these appends.
        self._single: dict[int, tuple[int, list[str]]] = {}
        # The first append that is not joined yet, with the lines before it: joined appends are read together.
        self._mark: dict[int, Mark] = {}
        # A reader that polls fetches each object once.
        self._seen: dict[str, str] = {}

    def incarnations(self) -> list[int]:
        return sorted(int(name) for name in self._names(self._folder) if _FOLDER.fullmatch(name))

    def claim(self, incarnation: int) -> None:
        folder, mark = self._of(incarnation), uuid.uuid4().hex
        if incarnation in self.incarnations():
            raise taken(incarnation)
        try:
            with _reached(folder):
                # The mark distinguishes a repetition of this request from a second claimant's request.
                self._objects.create(f"{folder}/{_object(0)}", f"claimed by {mark}\n".encode())
        except IntegrityError as error:
            raise taken(incarnation) from error
        with _reached(folder):
            self._objects.put(f"{folder}/claim-{mark}", [])
        if any(name.startswith("claim-") and name != f"claim-{mark}" for name in self._names(folder)):
            raise taken(incarnation)
        self._next[incarnation] = 1
        self._single[incarnation] = (1, [])
        self._mark[incarnation] = Mark(1, 0)

    def append(self, incarnation: int, text: str) -> None:
        sent, unsure = self._failed.pop(incarnation, ("", ""))
        text = text.removeprefix(sent)
        # Text of unknown fate is written again, as the same bytes to the same object: a late arrival changes nothing.
        parts = [unsure, text.removeprefix(unsure)] if unsure and text.startswith(unsure) else [text]
        for part in filter(None, parts):
            self._failed[incarnation] = (sent, part)
            self._put(incarnation, part)
            sent += part
        self._failed.pop(incarnation, None)
        if len(self._single[incarnation][1]) >= self._joined:
            self._join(incarnation)

    def mark(self, incarnation: int) -> Mark:
        return self._mark[incarnation]

    def lines(self, incarnation: int, start: Mark = START) -> Iterator[str]:
        for path in self._fetched(self._of(incarnation), start.place):
            yield from self._seen[path].splitlines(keepends=True)

    def _put(self, incarnation: int, text: str) -> None:
        path = f"{self._of(incarnation)}/{_object(self._next[incarnation])}"
        with _reached(path):
            # Overwriting is safe: only the claimant writes in a claimed folder.
            self._objects.put(path, [text.encode()])
        self._next[incarnation] += 1
        self._single[incarnation][1].append(text)

    def _join(self, incarnation: int) -> None:
        """Join many objects into one. A failure loses no records: the next append tries again."""
        first, texts = self._single[incarnation]
        folder, last = self._of(incarnation), first + len(texts) - 1
        try:
            self._objects.put(f"{folder}/{first:08d}-{_object(last)}", [text.encode() for text in texts])
            self._single[incarnation] = (last + 1, [])
            lines = sum(text.count("\n") for text in texts)
            self._mark[incarnation] = Mark(last + 1, self._mark[incarnation].lines + lines)
            self._objects.remove([f"{folder}/{_object(number)}" for number in range(first, last + 1)])
        except ElasticError as error:
            logger.info("objects of the journal are not joined yet: %s", error)

    def _fetched(self, folder: str, start: int) -> list[str]:
        """The valid paths in order, from append `start` on; their content is in `_seen`."""
        while True:
            paths = [f"{folder}/{name}" for name in _counted(self._names(folder), start)]
            try:
                self._fetch([path for path in paths if path not in self._seen])
                return paths
            except IntegrityError:
                # Joined since the listing. A journal is not joined twice between two listings, so this loop ends.
                if set(paths) <= {f"{folder}/{name}" for name in self._names(folder)}:
                    raise

    def _fetch(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        with ThreadPoolExecutor(min(_READS_AT_ONCE, len(paths)), "journal-read") as pool, _reached(self._folder):
            for path, data in zip(paths, pool.map(self._objects.get, paths), strict=True):
                text = data.decode("utf-8", errors="replace")
                self._seen[path] = "" if _CLAIM.fullmatch(text) else text

    def _names(self, folder: str) -> list[str]:
        with _reached(folder):
            return self._objects.names(folder)

    def _of(self, incarnation: int) -> str:
        return f"{self._folder}/{incarnation:06d}"


def _counted(names: Sequence[str], start: int) -> list[str]:
    """The objects of a segment in order, without those that are covered by a joined one or are before `start`."""
    spans = []
    for name in names:
        if found := _OBJECT.fullmatch(name):
            first = int(found[1])
            spans.append((first, -int(found[2] or first), name))
    counted, covered = [], start - 1
    for first, last, name in sorted(spans):
        if first > covered:
            counted.append(name)
            covered = -last
    return counted


def _object(number: int) -> str:
    return f"{number:08d}.jsonl"


@contextlib.contextmanager
def _reached(path: str) -> Iterator[None]:
    """Missing rights count as unreachable storage: they can be granted while training continues."""
    try:
        yield
    except (StorageError, UsageError) as error:
        raise StorageError(f"the journal at {path} cannot be reached: {error.message}") from error

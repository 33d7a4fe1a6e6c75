"""The append-only record of what happened to a run and why.

A record is one JSON object: {"seq", "incarnation", "time", "type", ...}; its types are in `elastic.observe.records`,
its line's form in `elastic.observe.journal_lines`. `seq` grows by one per record over the whole run; `incarnation`
numbers the controllers that wrote; `time` is wall clock seconds. Each writer opens its segment with a "begin" record.

Fencing needs no clock: the "begin" record says how many lines of each older segment its writer had read. What an older
controller wrote after that was unknown to its successor; readers leave it out and report it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.errors import Fenced, RunNotFound
from elastic.core.secrets import redact_values
from elastic.observe.journal_lines import Problem as Problem
from elastic.observe.journal_lines import Record as Record
from elastic.observe.journal_lines import parse, to_line
from elastic.observe.open_segments import open_segments
from elastic.observe.records import begin
from elastic.observe.segments import Segments
from elastic.store.objects import TIMEOUT_S

logger = logging.getLogger(__name__)

# (incarnation, seq) of a record: where a reader goes on.
Cursor = tuple[int, int]

# A controller that restarts every second for a year has a smaller number: a segment above was not made by one.
_HIGHEST = 99_999_999


@dataclass(frozen=True)
class _Unsure:
    """One record of an extend that failed: it is unknown whether it was written."""

    given: Mapping[str, Any]
    stamped: Record
    line: str


class JournalWriter:
    """The one writer of a run's journal: one controller. Methods may be called from any thread.

    `incarnation` None claims the next number, whatever it is. `replayed` holds the records of all incarnations before.
    `problems` say what of them was left out. `secrets` are texts that must not be written; what looks like a credential
    is not written either. Raises Fenced when the incarnation is taken or is not the newest.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        incarnation: int | None = None,
        clock: Callable[[], float] = time.time,
        *,
        timeout_s: float = TIMEOUT_S,
        secrets: Sequence[str] = (),
    ) -> None:
        self._segments = open_segments(url, run_id, timeout_s)
        self._clock = clock
        self._secrets = tuple(secrets)
        self._unsure: list[_Unsure] = []
        self._lock = threading.Lock()
        self.incarnation = _claim_next(self._segments) if incarnation is None else incarnation
        if incarnation is not None:
            self._check_newest()
            self._segments.claim(incarnation)
        # Read after the claim: from here on an older writer that looks finds itself fenced.
        parsed = {i: items for i, items in _parse_all(self._segments).items() if i < self.incarnation}
        records, self.problems = _sift(parsed, self._segments)
        self.replayed: tuple[Record, ...] = tuple(records)
        self._seq = max((int(record["seq"]) for record in records), default=0)
        self.append(begin({i: _whole(items) for i, items in parsed.items()}))

    def append(self, record: Mapping[str, Any]) -> Record:
        """Durable on return; gives the record as stamped. Raises Fenced when a newer controller has taken over, and
        StorageError, after which the same record is to be appended again."""
        return self.extend([record])[0]

    def extend(self, records: Sequence[Mapping[str, Any]]) -> list[Record]:
        """`append` for several at once: all of them or none. A record is serialised once, however often it is tried."""
        with self._lock:
            self._check_newest()
            self._unsure = unsure = self._lines(records)
            self._segments.append(self.incarnation, "".join(one.line for one in unsure))
            self._unsure = []
            self._seq += len(unsure)
            return [one.stamped for one in unsure]

    def _lines(self, records: Sequence[Mapping[str, Any]]) -> list[_Unsure]:
        """Those that were given before keep their stamps, so that they are written as the same bytes."""
        known = len(self._unsure)
        same = known <= len(records) and all(
            one.given is record or one.given == record for one, record in zip(self._unsure, records, strict=False)
        )
        lines = list(self._unsure) if same else []
        for record in records[len(lines) :]:
            stamped = self._stamp(redact_values(record, self._secrets), self._seq + 1 + len(lines))
            lines.append(_Unsure(record, stamped, to_line(stamped)))
        return lines

    def _stamp(self, record: Mapping[str, Any], seq: int) -> Record:
        stamp = {"seq": seq, "incarnation": self.incarnation, "time": round(self._clock(), 4)}
        return {**stamp, **record, **stamp}

    def _check_newest(self) -> None:
        newest = max(_incarnations(self._segments), default=0)
        if newest > self.incarnation:
            raise Fenced(f"incarnation {self.incarnation} writes no more: incarnation {newest} has taken over")


class JournalReader:
    """Reads a run's journal during the run or after it. Never changes it."""

    def __init__(self, url: str, run_id: str) -> None:
        self._segments = open_segments(url, run_id)
        self._run_id = run_id
        self._said: set[str] = set()
        self.problems: tuple[Problem, ...] = ()

    def exists(self) -> bool:
        return bool(_incarnations(self._segments))

    def records(self, after: Cursor | None = None) -> list[Record]:
        """In order. `after` is `cursor(record)` of the last known one. `problems` then say what was left out.

        Raises RunNotFound when there is no journal, StorageError when it cannot be reached.
        """
        if not self.exists():
            raise RunNotFound(f"run {self._run_id!r} has no journal here")
        records, self.problems = _sift(_parse_all(self._segments), self._segments)
        for problem in self.problems:
            if problem.sentence not in self._said:
                self._said.add(problem.sentence)
                logger.warning("%s", problem.sentence)
        return [record for record in records if after is None or cursor(record) > after]


def cursor(record: Mapping[str, Any]) -> Cursor:
    """Orders records over the whole run."""
    return int(record["incarnation"]), int(record["seq"])


def _claim_next(segments: Segments) -> int:
    while True:
        incarnation = max(_incarnations(segments), default=0) + 1
        try:
            segments.claim(incarnation)
        except Fenced:
            # Two new controllers raced for the number; the loser sees it in the next listing.
            continue
        return incarnation


def _incarnations(segments: Segments) -> list[int]:
    return [incarnation for incarnation in segments.incarnations() if incarnation <= _HIGHEST]


def _parse_all(segments: Segments) -> dict[int, list[Record | Problem]]:
    return {i: list(parse(i, segments.lines(i))) for i in _incarnations(segments)}


def _sift(
    parsed: Mapping[int, Sequence[Record | Problem]], segments: Segments
) -> tuple[list[Record], tuple[Problem, ...]]:
    limits = _limits(parsed)
    records: list[Record] = []
    problems = [_foreign(found) for found in segments.incarnations() if found > _HIGHEST]
    for incarnation, items in sorted(parsed.items()):
        limit = limits.get(incarnation, len(items))
        for item in items[:limit]:
            if isinstance(item, Problem):
                problems.append(replace(item, place=len(records)))
            else:
                records.append(item)
        problems += [replace(_fenced(incarnation, item), place=len(records)) for item in items[limit:]]
    return records, tuple(problems)


def _limits(parsed: Mapping[int, Sequence[Record | Problem]]) -> dict[int, int]:
    """How many lines of each segment count: the fewest that any later "begin" record had read of it."""
    limits: dict[int, int] = {}
    for incarnation, items in parsed.items():
        first = items[0] if items else None
        if isinstance(first, dict) and first["type"] == "begin":
            for older, count in first.get("read", {}).items():
                if int(older) < incarnation:
                    limits[int(older)] = min(count, limits.get(int(older), count))
    return limits


def _fenced(incarnation: int, item: Record | Problem) -> Problem:
    if isinstance(item, Problem):
        # Nothing of it would have counted.
        return replace(item, maybe_event=False)
    sentence = f"record {item['seq']} of incarnation {incarnation} was written after a newer one began; left out"
    return Problem("fenced", incarnation, sentence, item)


def _foreign(incarnation: int) -> Problem:
    return Problem("foreign", incarnation, f"journal segment {incarnation} was not made by a controller; left out")


def _whole(items: Sequence[Record | Problem]) -> int:
    """How many lines were read whole. A torn last line may yet be completed by a writer that still lives."""
    return sum(1 for item in items if not (isinstance(item, Problem) and item.kind == "torn"))

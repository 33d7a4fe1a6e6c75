"""The journal: an append-only record of what happened to a run and why.

A record is one JSON object: {"seq", "incarnation", "time", "type", ...}; its types are in `elastic.observe.records`,
its line's form in `elastic.observe.journal_lines`. `seq` grows by one per record over the whole run; `incarnation`
numbers the controllers that wrote; `time` is wall clock seconds. Each writer opens its segment with a "begin" record.

Fencing needs no clock: the "begin" record says how many lines of each older segment its writer had read. Lines that an
older controller wrote after that were unknown to its successor; readers skip and report them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from elastic.core.errors import Fenced, RunNotFound
from elastic.core.secrets import redact_values
from elastic.observe.journal_lines import Problem as Problem
from elastic.observe.journal_lines import Record as Record
from elastic.observe.journal_lines import limits, parse, sift, to_line, whole
from elastic.observe.open_segments import open_points, open_segments
from elastic.observe.records import begin
from elastic.observe.replay_points import ReplayPoint, refused
from elastic.observe.segments import START, Mark, Segments
from elastic.store.objects import TIMEOUT_S

logger = logging.getLogger(__name__)

# (incarnation, seq) of a record: where a reader continues.
Cursor = tuple[int, int]

# A controller that restarts every second for a year stays below this: a higher segment was not made by one.
_HIGHEST = 99_999_999


@dataclass(frozen=True)
class _Unsure:
    """One record of an extend that failed: it is unknown whether it was written."""

    given: Mapping[str, Any]
    stamped: Record
    line: str


class JournalWriter:
    """The one writer of a run's journal: one controller. Methods may be called from any thread.

    `incarnation` None claims the next number. `replayed` holds the records of all earlier incarnations or, if
    `read_point` is given and can read a `point`, those after that point. `problems` name what was skipped of them.
    `secrets` are texts that must not be written; text that looks like a credential is not written either. Raises Fenced
    if the incarnation is taken or is not the newest.
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
        read_point: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> None:
        self._segments = open_segments(url, run_id, timeout_s)
        self._points = open_points(url, run_id, timeout_s)
        self._clock = clock
        self._secrets = tuple(secrets)
        self._unsure: list[_Unsure] = []
        self._lock = threading.Lock()
        self.incarnation = _claim_next(self._segments) if incarnation is None else incarnation
        if incarnation is not None:
            self._check_newest()
            self._segments.claim(incarnation)
        # Read after the claim: from here on an older writer that checks finds itself fenced.
        self.point: ReplayPoint | None = None
        self.problems: tuple[Problem, ...] = _foreign(self._segments)
        # Characters of the journal's lines: those read at the start, and those written since.
        self.read_and_written = 0
        parsed = self._parse(read_point)
        point = self.point
        records, left_out = sift(parsed, {} if point is None else {point.incarnation: point.lines})
        self.replayed: tuple[Record, ...] = tuple(records)
        self.problems += left_out
        self._seq = max((int(record["seq"]) for record in records), default=0 if point is None else point.seq)
        self._read = {i: whole(items) for i, items in parsed.items()}
        if point is not None:
            self._read[point.incarnation] += point.lines
            self._read = {**point.read, **self._read}
        self._first_seq = self._seq + 1
        self.append(begin(self._read))

    def _parse(self, read_point: Callable[[Mapping[str, Any]], Any] | None) -> dict[int, list[Record | Problem]]:
        """The segments before this one, from the newest usable point on."""
        older = [i for i in _incarnations(self._segments) if i < self.incarnation]
        for point in self._points.newest_first(read_point) if read_point is not None else ():
            if isinstance(point, Problem):
                self.problems += (point,)
                continue
            parsed = {i: list(self._segment(i, point)) for i in older if i >= point.incarnation}
            if point.incarnation in parsed and limits(parsed).get(point.incarnation, point.lines) >= point.lines:
                self.point = point
                return parsed
            what = f"a replay point of journal segment {point.incarnation} covers lines that do not count"
            self.problems += (refused(point.incarnation, what),)
        self.read_and_written = 0
        return {i: list(self._segment(i, None)) for i in older}

    def _segment(self, incarnation: int, point: ReplayPoint | None) -> Iterator[Record | Problem]:
        inside = point is not None and point.incarnation == incarnation
        known, start = (point.lines, point.mark) if point is not None and inside else (0, START)
        lines = self._counted(self._segments.lines(incarnation, start))
        return parse(incarnation, islice(lines, known - start.lines, None), known)

    def _counted(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.read_and_written += len(line)
            yield line

    def append(self, record: Mapping[str, Any]) -> Record:
        """Durable on return; gives the record as stamped. Raises Fenced when a newer controller has taken over, and
        StorageError, after which the same record is to be appended again."""
        return self.extend([record])[0]

    def extend(self, records: Sequence[Mapping[str, Any]]) -> list[Record]:
        """`append` for several records: all of them or none. A record is serialised once, for all attempts."""
        with self._lock:
            self._check_newest()
            self._unsure = unsure = self._stamped(records)
            self._segments.append(self.incarnation, "".join(one.line for one in unsure))
            self._unsure = []
            self._seq += len(unsure)
            self.read_and_written += sum(len(one.line) for one in unsure)
            return [one.stamped for one in unsure]

    def mark(self) -> Mark:
        """For `save_point`: where the lines that are written now end, or earlier."""
        return self._segments.mark(self.incarnation)

    def save_point(self, content: Mapping[str, Any], count: int, mark: Mark) -> int:
        """Store `content` as the knowledge after the first `count` records that were appended here; all of them are
        durable, and `mark` was taken when no more were written. Returns the size in bytes.

        Raises Fenced as `append` does, and what `Objects.put` raises.
        """
        self._check_newest()
        lines = count + 1  # the "begin" record
        point = ReplayPoint(self.incarnation, lines, mark, self._first_seq + count, self._read, 0, content)
        line = to_line(self._stamp(redact_values(point.record(), self._secrets), 0))
        self._points.save(self.incarnation, lines, line)
        return len(line)

    def _stamped(self, records: Sequence[Mapping[str, Any]]) -> list[_Unsure]:
        """Records of a failed attempt keep their stamps, so that they are written as the same bytes."""
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
        """In order. `after` is `cursor(record)` of the last known one. `problems` then name what was skipped.

        Raises RunNotFound when there is no journal, StorageError when it cannot be reached.
        """
        if not self.exists():
            raise RunNotFound(f"run {self._run_id!r} has no journal here")
        records, left_out = sift(_parse_all(self._segments), {})
        self.problems = (*_foreign(self._segments), *left_out)
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


def _foreign(segments: Segments) -> tuple[Problem, ...]:
    return tuple(
        Problem("foreign", i, f"journal segment {i} was not made by a controller; skipped")
        for i in segments.incarnations()
        if i > _HIGHEST
    )

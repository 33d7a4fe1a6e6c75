"""The append-only record of what happened to a run and why.

A record is one JSON object: {"seq", "incarnation", "time", "type", ...}. `seq` grows by one per record over the whole
run; `incarnation` numbers the controllers that wrote; `time` is wall clock seconds. Types: "run", "event", "decision",
"generation", "incident", "checkpoint", "ledger", "samples", and "begin", by which each writer opens its segment.

Fencing needs no clock: the "begin" record says how many records of each older segment its writer had read. Whatever an
older controller wrote after that was not known to the one that took over; readers leave it out and report it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.errors import Fenced, RunNotFound
from elastic.core.secrets import redact
from elastic.observe.records import begin
from elastic.observe.segments import Segments, open_segments
from elastic.store.objects import TIMEOUT_S

logger = logging.getLogger(__name__)

Record = dict[str, Any]
# (incarnation, seq) of a record: where a reader goes on.
Cursor = tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """Something in the journal that was passed over, in a sentence."""

    kind: str  # "torn", "damaged" or "fenced"
    incarnation: int
    sentence: str
    record: Mapping[str, Any] | None = None


class JournalWriter:
    """The one writer of a run's journal: one controller. Methods may be called from any thread.

    `incarnation` None claims the next number, whatever it is. `replayed` holds the records of all incarnations before.
    `secrets` are texts that must not be written; what looks like a credential is not written either.
    Raises Fenced when the incarnation is taken or is not the newest.
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
        # Given and stamped, of an extend that failed: it is not known whether they were written.
        self._unsure: list[tuple[Mapping[str, Any], Record]] = []
        self._lock = threading.Lock()
        self.incarnation = _claim_next(self._segments) if incarnation is None else incarnation
        if incarnation is not None:
            self._check_newest()
            self._segments.claim(incarnation)
        # Read after the claim: from here on an older writer that looks finds itself fenced.
        parsed = {i: items for i, items in _parse_all(self._segments).items() if i < self.incarnation}
        records, self.problems = _sift(parsed)
        self.replayed: tuple[Record, ...] = tuple(records)
        self._seq = max((int(record["seq"]) for record in records), default=0)
        self.append(begin({i: _whole(items) for i, items in parsed.items()}))

    def append(self, record: Mapping[str, Any]) -> Record:
        """Durable on return; gives the record as stamped. Raises Fenced when a newer controller has taken over, and
        StorageError, after which the same record is to be appended again."""
        return self.extend([record])[0]

    def extend(self, records: Sequence[Mapping[str, Any]]) -> list[Record]:
        """`append` for several at once: all of them or none."""
        with self._lock:
            self._check_newest()
            stamped = self._stamped(records)
            self._unsure = list(zip(records, stamped, strict=True))
            self._segments.append(self.incarnation, "".join(redact(_line(r), self._secrets) for r in stamped))
            self._unsure = []
            self._seq += len(stamped)
            return stamped

    def _stamped(self, records: Sequence[Mapping[str, Any]]) -> list[Record]:
        """Those that were given before get the stamps that they had, so that they are written as the same bytes."""
        before = self._unsure if [given for given, _ in self._unsure] == list(records[: len(self._unsure)]) else []
        again = [stamped for _, stamped in before]
        first = self._seq + 1 + len(again)
        return again + [self._stamp(record, first + i) for i, record in enumerate(records[len(again) :])]

    def _stamp(self, record: Mapping[str, Any], seq: int) -> Record:
        stamp = {"seq": seq, "incarnation": self.incarnation, "time": round(self._clock(), 4)}
        return {**stamp, **record, **stamp}

    def _check_newest(self) -> None:
        newest = max(self._segments.incarnations(), default=0)
        if newest > self.incarnation:
            raise Fenced(f"incarnation {self.incarnation} writes no more: incarnation {newest} has taken over")


class JournalReader:
    """Reads a run's journal while it is written, or after. Never changes it."""

    def __init__(self, url: str, run_id: str) -> None:
        self._segments = open_segments(url, run_id)
        self._run_id = run_id
        self._told: set[str] = set()
        self.problems: tuple[Problem, ...] = ()

    def exists(self) -> bool:
        return bool(self._segments.incarnations())

    def records(self, after: Cursor | None = None) -> list[Record]:
        """In order. `after` is `cursor(record)` of the last one known. What was passed over is in `problems`.

        Raises RunNotFound when there is no journal, StorageError when it cannot be reached.
        """
        if not self.exists():
            raise RunNotFound(f"run {self._run_id!r} has no journal here")
        records, self.problems = _sift(_parse_all(self._segments))
        for problem in self.problems:
            if problem.sentence not in self._told:
                self._told.add(problem.sentence)
                logger.warning("%s", problem.sentence)
        return [record for record in records if after is None or cursor(record) > after]


def cursor(record: Mapping[str, Any]) -> Cursor:
    """Orders records over the whole run."""
    return int(record["incarnation"]), int(record["seq"])


def _claim_next(segments: Segments) -> int:
    while True:
        incarnation = max(segments.incarnations(), default=0) + 1
        try:
            segments.claim(incarnation)
        except Fenced:
            # Two new controllers raced for the number; the loser sees it in the next listing.
            continue
        return incarnation


def _parse_all(segments: Segments) -> dict[int, list[Record | Problem]]:
    return {i: list(_parse(i, segments.lines(i))) for i in segments.incarnations()}


def _sift(parsed: Mapping[int, Sequence[Record | Problem]]) -> tuple[list[Record], tuple[Problem, ...]]:
    limits = _limits(parsed)
    records: list[Record] = []
    problems: list[Problem] = []
    for incarnation, items in sorted(parsed.items()):
        limit = limits.get(incarnation, len(items))
        problems += [_fenced(incarnation, item) for item in items[limit:]]
        problems += [item for item in items[:limit] if isinstance(item, Problem)]
        records += [item for item in items[:limit] if not isinstance(item, Problem)]
    return records, tuple(problems)


def _limits(parsed: Mapping[int, Sequence[Record | Problem]]) -> dict[int, int]:
    """How many lines of each segment count: the fewest that any later "begin" record had read of it."""
    limits: dict[int, int] = {}
    for incarnation, items in parsed.items():
        first = items[0] if items else None
        if isinstance(first, dict) and first.get("type") == "begin":
            for older, count in first.get("read", {}).items():
                if int(older) < incarnation:
                    limits[int(older)] = min(int(count), limits.get(int(older), int(count)))
    return limits


def _parse(incarnation: int, lines: Iterable[str]) -> Iterator[Record | Problem]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if line.endswith("\n") and isinstance(record, dict) and {"seq", "type"} <= record.keys():
            yield {**record, "incarnation": incarnation}
        elif line.endswith("\n"):
            yield Problem(
                "damaged", incarnation, f"line {number} of journal segment {incarnation} is damaged; left out"
            )
        else:
            yield Problem("torn", incarnation, f"the last line of journal segment {incarnation} is torn; left out")


def _fenced(incarnation: int, item: Record | Problem) -> Problem:
    if isinstance(item, Problem):
        return item
    sentence = f"record {item['seq']} of incarnation {incarnation} was written after a newer one began; left out"
    return Problem("fenced", incarnation, sentence, item)


def _whole(items: Sequence[Record | Problem]) -> int:
    """How many lines have been read whole; a torn last line may still be completed by a writer that is not dead."""
    return sum(1 for item in items if not (isinstance(item, Problem) and item.kind == "torn"))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=True) + "\n"

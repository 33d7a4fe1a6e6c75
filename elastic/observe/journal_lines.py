"""The form of a journal's line: a record as JSON with a checksum, and the problems that reading may find.

A line is `{"seq":7,...,"crc":"1f2e3d4c"}`: the last key is the CRC-32 (zlib's) of the line without that key. It tells
a damaged line from a sound one; it does not protect against an attacker. Segments of releases before checksums have
none, and their lines are accepted without.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

Record = dict[str, Any]

_SEAL = re.compile(r',"crc":"([0-9a-f]{8})"\}\n\Z')
_TYPE = re.compile(r'\{"seq":[0-9]+,"incarnation":[0-9]+,"time":[0-9.]+,"type":"([a-z]+)"')
# What a line with another type may have been is not known: the damage may be in that very word.
_NO_EVENTS = frozenset(
    ("run", "decision", "generation", "steps", "restore", "checkpoint", "incident", "samples", "ledger", "facts")
)
# A month of training writes lines of some kilobytes; a longer line is not a record of this project.
_LONGEST = 64 << 20
# These first lines decide whether a segment has checksums; in one that has, not all of them are damaged.
_ENOUGH = 100


@dataclass(frozen=True)
class Problem:
    """A part of the journal that was skipped, in a sentence.

    `maybe_event`: it may have been an event, so that a replay cannot continue after it. `place` is the number of
    records before it, in the order of the whole journal.
    """

    kind: str  # "torn", "damaged", "fenced", "foreign" or "point"
    incarnation: int
    sentence: str
    record: Mapping[str, Any] | None = None
    maybe_event: bool = False
    place: int = 0


def to_line(record: Mapping[str, Any]) -> str:
    """The record as a line with its checksum. Raises TypeError or ValueError for values that JSON cannot represent."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=True)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, for example in a file name that is not UTF-8: only escapes can represent it.
        text = json.dumps(record, separators=(",", ":"), allow_nan=True)
    return f'{text[:-1]},"crc":"{_crc(text)}"}}\n'


def parse(incarnation: int, lines: Iterable[str], before: int = 0) -> Iterator[Record | Problem]:
    """Each line of a segment as a record or as a problem.

    `before`: the number of lines of the segment that are known already; only a segment with checksums is read in parts.
    """
    rest = iter(lines)
    first = list(islice(rest, _ENOUGH))
    sealed = before > 0 or any(_sound(line) for line in first)
    for number, line in enumerate(chain(first, rest), before + 1):
        record = _record(line, sealed)
        if record is not None:
            yield {**record, "incarnation": incarnation}
        elif line.endswith("\n"):
            yield _damaged(incarnation, number, line)
        else:
            yield Problem("torn", incarnation, f"the last line of journal segment {incarnation} is torn; skipped")


def sift(
    parsed: Mapping[int, Sequence[Record | Problem]], before: Mapping[int, int]
) -> tuple[list[Record], tuple[Problem, ...]]:
    """The valid records of parsed segments, in order, and the problems.

    `before`: how many first lines of these segments are not among the parsed ones.
    """
    found = limits(parsed)
    records: list[Record] = []
    problems: list[Problem] = []
    for incarnation, items in sorted(parsed.items()):
        limit = max(0, found[incarnation] - before.get(incarnation, 0)) if incarnation in found else len(items)
        for item in items[:limit]:
            if isinstance(item, Problem):
                problems.append(replace(item, place=len(records)))
            else:
                records.append(item)
        problems += [replace(_fenced(incarnation, item), place=len(records)) for item in items[limit:]]
    return records, tuple(problems)


def limits(parsed: Mapping[int, Sequence[Record | Problem]]) -> dict[int, int]:
    """How many lines of each segment count: the fewest that any later "begin" record had read of it."""
    found: dict[int, int] = {}
    for incarnation, items in parsed.items():
        first = items[0] if items else None
        if isinstance(first, dict) and first["type"] == "begin":
            for older, count in first.get("read", {}).items():
                if int(older) < incarnation:
                    found[int(older)] = min(count, found.get(int(older), count))
    return found


def whole(items: Sequence[Record | Problem]) -> int:
    """How many lines were read whole. A torn last line may yet be completed by a writer that still lives."""
    return sum(1 for item in items if not (isinstance(item, Problem) and item.kind == "torn"))


def _fenced(incarnation: int, item: Record | Problem) -> Problem:
    if isinstance(item, Problem):
        # None of its lines would have counted.
        return replace(item, maybe_event=False)
    sentence = f"record {item['seq']} of incarnation {incarnation} was written after a newer one began; skipped"
    return Problem("fenced", incarnation, sentence, item)


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def _sound(line: str) -> bool:
    seal = _SEAL.search(line)
    return seal is not None and _crc(line[: seal.start()] + "}") == seal[1]


def _record(line: str, sealed: bool) -> Record | None:
    if not line.endswith("\n") or len(line) > _LONGEST or (sealed and not _sound(line)):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not _well_formed(record):
        return None
    record.pop("crc", None)
    return record


def _well_formed(record: Mapping[str, Any]) -> bool:
    """Whether readers can rely on the stamps and on the keys that the record's type requires."""
    seq, when = record.get("seq"), record.get("time", 0.0)
    if not _whole_number(seq) or not isinstance(when, (int, float)) or isinstance(when, bool):
        return False
    match record.get("type"):
        case "begin":
            read = record.get("read", {})
            return isinstance(read, dict) and all(k.isdecimal() and _whole_number(n) for k, n in read.items())
        case "steps":
            found = record.get("steps")
            return isinstance(found, list) and all(isinstance(s, dict) and _whole_number(s.get("step")) for s in found)
        case "generation":
            return all(_whole_number(record.get(key, 0)) for key in ("number", "world_size", "first_step", "last_step"))
        case "event":
            return isinstance(record.get("event"), str)
        case kind:
            return isinstance(kind, str)


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _damaged(incarnation: int, number: int, line: str) -> Problem:
    kind = _TYPE.match(line)
    known = "" if kind is None else f' (a "{kind[1]}" record)'
    return Problem(
        "damaged",
        incarnation,
        f"line {number} of journal segment {incarnation}{known} is damaged; skipped",
        maybe_event=kind is None or kind[1] not in _NO_EVENTS,
    )

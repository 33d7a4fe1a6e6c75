"""Replay points: the controller's knowledge after some lines of the journal, so that a restart reads only the rest.

    journal/points/000003-000000012345.json     after 12,345 lines of segment 3

A point is one line with a checksum, as the journal's are. It is never the only copy: the segments are kept whole, and
a point that is damaged, of another release, or covers lines that do not count is skipped.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.errors import StorageError
from elastic.observe.journal_lines import Problem, parse
from elastic.observe.segments import Mark
from elastic.store.objects import Objects

logger = logging.getLogger(__name__)

# Not \d, which matches the digits of every script.
_NAME = re.compile(r"([0-9]{6,18})-([0-9]{12,18})\.json")
_TYPE = "point"
# More than one, because the newest may be damaged.
_KEPT = 2


@dataclass(frozen=True)
class ReplayPoint:
    """The knowledge after the first `lines` lines of segment `incarnation`.

    Reading begins at `mark`, which may be some lines earlier. `seq` is the number of the last record, `read` how many
    lines of each older segment count, `bytes` the size of the point, and `content` what the controller had handed over.
    """

    incarnation: int
    lines: int
    mark: Mark
    seq: int
    read: Mapping[int, int]
    bytes: int
    content: Any

    def record(self) -> dict[str, Any]:
        """The point as a record; the journal stamps it."""
        return {
            "type": _TYPE, "lines": self.lines, "place": self.mark.place, "place_lines": self.mark.lines,
            "last_seq": self.seq, "read": {str(i): count for i, count in self.read.items()}, "content": self.content,
        }  # fmt: skip


class PointFiles:
    """The points of one journal. `save` by the one writer, `newest_first` by a new controller."""

    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects = objects
        self._folder = folder

    def save(self, incarnation: int, lines: int, line: str) -> None:
        """Durable on return; older ones but the last are removed. Raises what `Objects.put` does."""
        self._objects.put(f"{self._folder}/{incarnation:06d}-{lines:012d}.json", [line.encode()])
        old = [name for place, name in self._listed() if place < (incarnation, lines)][_KEPT - 1 :]
        self._objects.remove([f"{self._folder}/{name}" for name in old])

    def newest_first(self, read: Callable[[Mapping[str, Any]], Any]) -> Iterator[ReplayPoint | Problem]:
        """`read` converts a point's stored content to `ReplayPoint.content`; if it raises, the point is refused.

        Raises StorageError if storage cannot be reached.
        """
        for (incarnation, _), name in self._listed():
            try:
                text = self._objects.get(f"{self._folder}/{name}").decode(errors="replace")
                yield _point(incarnation, text, read)
            except StorageError:
                raise
            except Exception as error:
                logger.debug("replay point %s", name, exc_info=True)
                what = f"{type(error).__name__}: {str(error)[:200]}"
                yield refused(incarnation, f"replay point {name} of the journal cannot be used ({what})")

    def _listed(self) -> list[tuple[tuple[int, int], str]]:
        found = [(match, name) for name in self._objects.names(self._folder) if (match := _NAME.fullmatch(name))]
        return sorted((((int(match[1]), int(match[2])), name) for match, name in found), reverse=True)


def refused(incarnation: int, what: str) -> Problem:
    """The sentence about a skipped point."""
    return Problem("point", incarnation, f"{what}; the journal is read from an earlier place")


def _point(incarnation: int, text: str, read: Callable[[Mapping[str, Any]], Any]) -> ReplayPoint:
    # Parsed as the second line of a segment, which must have a checksum.
    (record,) = parse(incarnation, [text], before=1)
    if isinstance(record, Problem) or record["type"] != _TYPE:
        raise ValueError("it is damaged")
    return ReplayPoint(
        incarnation,
        int(record["lines"]),
        Mark(int(record["place"]), int(record["place_lines"])),
        int(record["last_seq"]),
        {int(i): int(count) for i, count in record["read"].items()},
        len(text),
        read(record["content"]),
    )

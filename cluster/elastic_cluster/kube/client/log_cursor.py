"""The position in a log, so that reading resumes after a broken stream without losing or repeating a line. Pure."""

from __future__ import annotations

from collections.abc import Iterator


class LogCursor:
    """Of one container. Lines come as "2026-01-01T00:00:01.000000005Z text", ordered by time; equal times do occur.

    `since` is where to read on from. Kubernetes compares whole seconds, so lines come again: those that were seen are
    left out by their time, and among equal times by how many of them were seen.
    """

    def __init__(self) -> None:
        self._time = ""
        self._seen_at_time = 0
        # While lines that were seen come again: how many of the last time are still to come. None after that.
        self._again: int | None = None
        self._rest = b""

    @property
    def since(self) -> str | None:
        """RFC 3339, whole seconds; None when nothing was read."""
        return f"{self._time[:19]}Z" if self._time else None

    def begin(self) -> None:
        """A stream is opened, from `since` on. What was left of a broken line comes again as a whole."""
        self._again = self._seen_at_time if self._time else None
        self._rest = b""

    def lines(self, chunk: bytes) -> Iterator[str]:
        """The new ones among those that end in this chunk, without their time."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            text = line.decode(errors="replace").rstrip("\r")
            time, _, content = text.partition(" ")
            if self._is_new(time):
                yield content

    def _is_new(self, time: str) -> bool:
        now, last = _sortable(time), _sortable(self._time)
        if self._again is not None:
            if now < last:
                return False
            if now == last and self._again > 0:
                self._again -= 1
                return False
            # From here on every line counts, also after a node's clock has been put back.
            self._again = None
        self._seen_at_time = self._seen_at_time + 1 if now == last else 1
        self._time = time
        return True


def _sortable(time: str) -> tuple[str, str]:
    """Fractions come without trailing zeros, so as texts they do not compare."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return seconds, fraction.ljust(9, "0")

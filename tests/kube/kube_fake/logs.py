"""What containers print, as the kubelet keeps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class PodLog:
    """One container's output. Lines come with their time, "2026-01-01T00:00:01.000000005Z text", in order."""

    lines: list[str] = field(default_factory=list)
    ended: bool = False
    # After how many more lines a stream is cut, and how many bytes of the next line are sent first; oldest first.
    # Without such bytes it ends as if the log had, with them the connection breaks.
    cuts: list[tuple[int, int]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    # How often it was opened, and from when on.
    opened: list[str | None] = field(default_factory=list)

    def write(self, *lines: str) -> None:
        with self.changed:
            self.lines.extend(lines)
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def stream(self, since: str | None, follow: bool, timestamps: bool, limit_s: float) -> Iterator[bytes]:
        """Lines from the second `since` on, until the end, a cut, or `limit_s` without a line."""
        with self.changed:
            self.opened.append(since)
            cut = self.cuts.pop(0) if self.cuts else None
        sent, position = 0, 0
        while True:
            with self.changed:
                if position >= len(self.lines):
                    if self.ended or not follow or not self.changed.wait(limit_s):
                        return
                    continue
                line = self.lines[position]
            position += 1
            # The kubelet compares whole seconds.
            if since is not None and line[:19] < since[:19]:
                continue
            data = ((line if timestamps else line.partition(" ")[2]) + "\n").encode()
            if cut is not None and sent >= cut[0]:
                if not cut[1]:
                    return
                yield data[: cut[1]]
                raise BrokenPipeError("the test has cut the connection")
            sent += 1
            yield data

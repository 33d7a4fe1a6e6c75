"""The lines for programs in a driver's log: one when the driver has reached its run, one when the run has ended.

The Jobs API keeps no exit code of a stopped job, and none of its fields says whether an ended driver had reached a run.
Followers and supervisors read both from these lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MARK = "elastic-driver: "

BEGAN = "began"
ENDED = "ended"


def began(run_id: str, attempt: int, how: str) -> str:
    """`how`: "started", "attached", "resumed" or "found ended"."""
    return _MARK + json.dumps({"event": BEGAN, "run": run_id, "attempt": attempt, "how": how})


def ended(run_id: str, status: str, exit_code: int, step: int | None, reason: str) -> str:
    told = {"run": run_id, "status": status, "exit_code": exit_code, "step": step, "reason": reason}
    return _MARK + json.dumps({"event": ENDED, **told})


def parse(line: str) -> Mapping[str, Any] | None:
    """The content of one of the two lines; None for any other line."""
    if not line.startswith(_MARK):
        return None
    try:
        told = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return told if isinstance(told, dict) and told.get("event") in (BEGAN, ENDED) else None


class LogReader:
    """The log of one attempt, read in pieces: lines for people, and the lines for programs."""

    def __init__(self) -> None:
        self.chars = 0
        self.began = False
        self.told: Mapping[str, Any] | None = None
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """The lines that are complete now."""
        self.chars += len(piece)
        *lines, self._rest = (self._rest + piece).split("\n")
        return [line for line in lines if not self._hear(line)]

    def close(self) -> list[str]:
        """The rest, at the end of the log."""
        rest, self._rest = self._rest, ""
        return [rest] if rest and not self._hear(rest) else []

    def _hear(self, line: str) -> bool:
        told = parse(line)
        if told is None:
            return False
        self.began = True
        if told["event"] == ENDED:
            self.told = told
        return True

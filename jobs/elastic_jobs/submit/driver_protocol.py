"""What a driver says in its log for programs: one line when it has reached its run, one when the run has ended.

The Jobs API keeps no exit code of a job that was stopped, and none of its fields says whether a driver that ended had a
run. Whoever follows reads both from here.
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
    """What one of the two lines says; None for any other line."""
    if not line.startswith(_MARK):
        return None
    try:
        told = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return told if isinstance(told, dict) and told.get("event") in (BEGAN, ENDED) else None


class LogReader:
    """The log of one attempt, as it comes in pieces: lines for people, and what was said for programs."""

    def __init__(self) -> None:
        self.chars = 0
        self.began = False
        self.told: Mapping[str, Any] | None = None
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """The lines that are whole now."""
        self.chars += len(piece)
        *lines, self._rest = (self._rest + piece).split("\n")
        return [line for line in lines if not self._hear(line)]

    def close(self) -> list[str]:
        """What is left when nothing more can come."""
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

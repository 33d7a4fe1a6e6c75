"""Data on stdout, messages on stderr. The only module of the command line that writes to either."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Print one line for the user."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def confirmed(question: str) -> bool:
    """Ask on a terminal; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def put(text: str) -> None:
    """One line of data for the reader of the command's output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def put_json(data: Mapping[str, Any]) -> None:
    put(json.dumps(data))

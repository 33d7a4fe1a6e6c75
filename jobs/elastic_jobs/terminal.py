"""Data on stdout, talk on stderr. The only place of the project that writes to either."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Talk: one line for a person."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def put(text: str) -> None:
    """Data: one line for whoever reads the command's output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def put_json(data: Mapping[str, Any]) -> None:
    put(json.dumps(data))

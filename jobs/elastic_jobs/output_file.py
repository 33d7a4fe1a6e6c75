"""Files that a command writes for its user: whole or not at all, so that no reader finds a partial one."""

from __future__ import annotations

import os
from pathlib import Path

from elastic.core.errors import UsageError


def write_whole(file: str | Path, text: str) -> None:
    """Raises UsageError if the file cannot be written."""
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{str(file)!r} cannot be written: {error.strerror or error}") from error

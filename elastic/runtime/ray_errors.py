"""What Ray's errors say, in one line."""

from __future__ import annotations


def sentence(error: BaseException) -> str:
    """The last line of an error's text, which for an error in an actor follows the actor's traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:500]

"""Numbers in sentences."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """ "1 worker", "2 workers": `noun` takes an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def verb(count: int, one: str = "is", more: str = "are") -> str:
    """The form that agrees with `count` of something."""
    return one if count == 1 else more

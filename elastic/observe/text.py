"""Formatting helpers of the readers: safe text, durations, sizes, plain tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any


def clean(text: object) -> str:
    """One line without control characters: evidence comes from user code and may contain any character."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())


def clock(time_s: float) -> str:
    """Wall clock seconds as a time of day, UTC."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%H:%M:%S")


def date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float | None) -> str:
    """ "0.41 s", "12.3 s", "3 min 05 s", "2 h 07 min"; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def brief(seconds: float) -> str:
    """Of a part of a step: "0.12 ms", "45.2 ms"; a second and more as `duration`."""
    if seconds >= 1:
        return duration(seconds)
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.1f} ms"


def size(count: float | None) -> str:
    """Bytes in decimal units."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def origin(source: object, bytes_from: Mapping[str, Any] | None) -> str:
    """Where restored state came from: "memory (8.3 MB of the readers' nodes, 1.7 MB over the network)"; "-": none."""
    own, network, stored = (finite((bytes_from or {}).get(name)) for name in ("own_node", "network", "storage"))
    if own or network:
        return f"{clean(source)} ({size(own)} of the readers' nodes, {size(network)} over the network)"
    return clean(source or "-") + (f" ({size(stored)})" if stored else "")


def number(value: Any, form: str = ".4f") -> str:
    return format(value, form) if finite(value) is not None else "-"


def finite(value: Any) -> float | None:
    """The number; None for anything else, NaN and infinity included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


_OUTCOMES = {
    "not-finished": "is not finished",
    "user-code-failed": "failed in user code",
    "usage": "cannot continue as it is written",
    "gave-up": "gave up",
    "no-capacity": "ended for lack of nodes",
    "integrity": "ended without an intact state to resume from",
}


def outcome(status: object) -> str:
    """A run's status as a verb: "is finished", "gave up"."""
    return _OUTCOMES.get(str(status)) or f"is {clean(status)}"


def world_change(before: object, after: object) -> str:
    """World sizes before and after an incident; an incident that ended the attempt has none after it."""
    return f"{'?' if before is None else before} -> {'end' if after is None else after}"


def mesh_words(mesh: object) -> str | None:
    """Sizes by axis; None where ranks share nothing."""
    return ", ".join(f"{axis} {size}" for axis, size in mesh.items()) if isinstance(mesh, Mapping) and mesh else None


def step_range(first: int | None, last: int | None) -> str:
    """Steps of a generation: `first` is the number of its first step, `last` the run's last step when it ended."""
    if first is None:
        return "-"
    if last is None:
        return f"from {first}"
    return f"{first} to {last}" if last >= first else "none"


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Aligned columns in plain text, headed by the keys of the first row."""
    if not rows:
        return []
    heads = list(rows[0])
    widths = [max(len(head), *(len(row[head]) for row in rows)) for head in heads]
    lines = ["  ".join(text.ljust(width) for text, width in zip(heads, widths, strict=True))]
    lines += ["  ".join(row[head].ljust(width) for head, width in zip(heads, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]

"""How audits put numbers and words into the integers that ranks exchange."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from elastic.comm.agreement import Agreement

# Bytes of one rank's words, a multiple of eight.
_LENGTH = 160


def bits(values: Sequence[float]) -> list[int]:
    return list(struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values)))


def doubles(values: Sequence[int]) -> list[float]:
    return list(struct.unpack(f"<{len(values)}d", struct.pack(f"<{len(values)}q", *values)))


def texts_by_rank(agreement: Agreement, text: str) -> list[str]:
    """Every rank's `text`, cut to its first bytes. Collective."""
    raw = text.encode()[:_LENGTH].ljust(_LENGTH, b"\0")
    rows = agreement.by_rank(struct.unpack(f"<{_LENGTH // 8}q", raw))
    return [struct.pack(f"<{len(row)}q", *row).rstrip(b"\0").decode(errors="ignore") for row in rows]

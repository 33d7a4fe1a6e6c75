"""Kubernetes quantities ("500m", "64Gi", 2) as exact numbers."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_QUANTITY = re.compile(r"\+?(\d+(?:\.\d*)?|\.\d+)(?:(Ki|Mi|Gi|Ti|Pi|Ei)|([numkMGTPE])|[eE]([+-]?\d{1,3}))?")
_BINARY = {unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse(text: str | int) -> Decimal:
    """In units (bytes, cores). Raises ValueError for a negative value or anything but a quantity."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity such as 2, 500m or 64Gi")
    number, binary, decimal, exponent = found.groups()
    if binary:
        return Decimal(number) * _BINARY[binary]
    return Decimal(number).scaleb(_DECIMAL[decimal] if decimal else int(exponent or 0))


def whole(text: str | int) -> int:
    """Rounded up, as KubeRay does for what it tells Ray. Raises ValueError."""
    return int(parse(text).to_integral_value(ROUND_CEILING))

"""Warnings that a process gives once."""

from __future__ import annotations

import logging
from functools import cache


@cache
def warn_once(logger: logging.Logger, message: str) -> None:
    logger.warning(message)

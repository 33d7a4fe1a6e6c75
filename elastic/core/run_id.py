"""Names of runs. A run id becomes a folder in storage and an actor's name, so it is checked once, here."""

from __future__ import annotations

import re

from elastic.core.errors import UsageError

_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_id(run_id: str) -> str:
    """The id itself. Raises UsageError for anything that could leave its folder or confuse a shell."""
    if _VALID.fullmatch(run_id) is None or ".." in run_id:
        raise UsageError(
            f"{run_id!r} is no run id: use letters, digits, '.', '_' and '-' (100 at most), "
            "beginning with a letter or digit"
        )
    return run_id


def new_run_id(name: str, stamp: str, suffix: str) -> str:
    """`<name>-<stamp>-<suffix>` with whatever a run id may not hold replaced by '-'. `suffix` keeps two apart."""
    clean = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "run"
    return check_run_id(f"{clean}-{stamp}-{suffix}")

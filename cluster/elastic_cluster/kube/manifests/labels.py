"""The labels by which our objects are known. Nothing without both of them is ever deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "ray-elastic"
RUN = "ray-elastic/run"


def labels(run_id: str) -> dict[str, str]:
    """Of every top-level object of a run. `run_id` must be a valid label value (63 characters at most)."""
    return {MANAGED_BY: MANAGER, RUN: run_id}


def selector(run_id: str | None = None) -> str:
    """For example "app.kubernetes.io/managed-by=ray-elastic,ray-elastic/run=gpt"; of all runs when None."""
    return f"{MANAGED_BY}={MANAGER}" + (f",{RUN}={run_id}" if run_id is not None else f",{RUN}")


def run_of(manifest: Mapping[str, Any]) -> str | None:
    """The run that an object belongs to; None when it is not ours."""
    found = manifest.get("metadata", {}).get("labels") or {}
    return str(found[RUN]) if found.get(MANAGED_BY) == MANAGER and RUN in found else None

"""The network between nodes as a run has measured it, for `elastic plan --from RUN`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.policy.calibration import OTHER, ZONE
from elastic.planner import Link, fit_link


def measured_network(records: Iterable[Mapping[str, Any]], run_id: str) -> tuple[str, int, Link]:
    """The farthest class of connections that was measured, how many they were, and the link that explains all their
    messages. Raises UsageError where nodes on different hosts have not measured any."""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    count: dict[str, int] = defaultdict(int)
    for record in records:
        if record.get("type") == "event" and record.get("event") == "NodeMeasured" and record.get("sent"):
            kind = str(record.get("link"))
            points[kind] += [(int(size), float(seconds)) for size, seconds in (*record["sent"], *record["received"])]
            count[kind] += 1
    farthest = next((kind for kind in (OTHER, ZONE) if kind in points), None)
    if farthest is None:
        raise UsageError(
            f"run {run_id} has measured no connection between two hosts; with calibration: {{policy: report}} in its "
            "job file each node that joins measures one"
        )
    return farthest, count[farthest], fit_link("send", 2, points[farthest])

"""A new worker of this project, until it is ready: in the place of a killed one, and on a node that joins.

Each step is made to last half a second by sleeping, as in `goodput`: with an accelerator the processors are free for a
worker that imports. Both with `fork_workers` and without, in the same run of the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.children import NotMeasured
from benchmarks.figures import Figure
from benchmarks.options import Options
from benchmarks.own import Cluster, OwnRun, Record, settings
from benchmarks.workload import SMALL
from elastic.core.settings import SnapshotSettings

CASE, NODES, _PACE_S, _LIMIT_S = "starts", 4, 0.5, 120.0


def measure(options: Options) -> list[Figure]:
    with Cluster(NODES) as cluster:
        return [figure for forked in (False, True) for figure in _measure(options, cluster, forked)]


def _measure(options: Options, cluster: Cluster, forked: bool) -> list[Figure]:
    made = settings(
        f"starts-{'forked' if forked else 'alone'}", options.folder, workers=(2, NODES),
        snapshots=SnapshotSettings(enabled=True, every_steps=1), save_every=100,
    )  # fmt: skip
    killed: list[float] = []
    joined: list[float] = []
    failure = ""
    cluster.heal()
    try:
        with OwnRun(cluster, replace(made, fork_workers=forked), SMALL.name, 1, pace_s=_PACE_S) as run:
            for _ in range(options.pick(5, 1)):
                if options.over:
                    raise NotMeasured("the time was over")
                run.wait_steps(3, NODES)
                at, _ = run.kill_worker()
                killed.append(_ready(run, at, "WorkerDied"))
                run.wait_steps(3, NODES)
                at, _ = run.kill_node()
                run.recovery(at)
                cluster.heal()
                joined.append(_ready(run, at, "SlotPlaced"))
            run.wait_steps(1, NODES)
    except NotMeasured as error:
        failure = str(error)
    how = "forked" if forked else "importing"
    return [
        Figure(CASE, f"worker SIGKILL -> its replacement ready, {how}", "s", tuple(killed), failure=failure),
        Figure(CASE, f"slot on a node that joined -> worker ready, {how}", "s", tuple(joined), failure=failure),
    ]


def _ready(run: OwnRun, since: float, first: str) -> float:
    """Seconds from the first event of that kind after `since` to the first WorkerReady after it."""

    def passed() -> float | None:
        return started(run.records(), since, first)

    seconds: float = run.until(passed, "a new worker to be ready", _LIMIT_S)
    return seconds


def started(records: Sequence[Record], since: float, first: str) -> float | None:
    """None where there is none yet."""
    events = [r for r in records if r["type"] == "event" and r["now"] >= since]
    begun = next((r["now"] for r in events if r["event"] == first), None)
    if begun is None:
        return None
    ready = next((r["now"] for r in events if r["event"] == "WorkerReady" and r["now"] >= begun), None)
    return None if ready is None else round(ready - begun, 3)

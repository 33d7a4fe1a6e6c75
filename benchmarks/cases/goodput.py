"""How many steps still count when nodes are killed again and again: every 60 seconds, and every 15 seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from elastic_cluster.source import ClusterError

from benchmarks.children import NotMeasured
from benchmarks.figures import Figure, Target, not_measured
from benchmarks.marks import StepDone, completed, read_marks
from benchmarks.options import Options
from benchmarks.own import Cluster, OwnRun, settings
from benchmarks.workload import SMALL
from elastic.core.settings import SnapshotSettings

CASE, SUBJECT = "goodput", "ray-elastic"
NODES, STAGE = 4, 2
# A step takes at least this long; what is missing is slept. See NOTES.
PACE_S = 0.5
NOTES = (
    f"a step lasts {PACE_S:g} s or longer, the rest of it is slept: an accelerator leaves the processor to the workers "
    "that start meanwhile, and training on two cores does not",
    "the last node that carries a rank is killed, and comes back as soon as it is dead",
    "steps of the newest timeline per second, over those per second of the undisturbed time before",
)
_WARM_STEPS = 10


@dataclass(frozen=True)
class Plan:
    every_s: float
    window_s: float
    undisturbed_s: float
    at_least: float


def plans(options: Options) -> list[Plan]:
    if options.quick:
        return [Plan(15.0, 30.0, 5.0, 75.0)]
    return [Plan(60.0, 600.0, 20.0, 92.0), Plan(15.0, 600.0, 20.0, 75.0)]


def measure(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    for plan in plans(options):
        name = f"committed steps under a kill every {plan.every_s:g} s for {plan.window_s / 60:g} minutes"
        target = Target("median", plan.at_least, at_most=False)
        try:
            figures += _report(name, target, _run(options, plan))
        except NotMeasured as error:
            figures.append(not_measured(CASE, name, "%", str(error), targets=(target,), notes=NOTES))
    return figures


def _run(options: Options, plan: Plan) -> dict[str, Any]:
    made = settings(
        f"every-{plan.every_s:g}", options.folder, workers=(1, NODES), save_every=100,
        snapshots=SnapshotSettings(enabled=True, every_steps=1),
    )  # fmt: skip
    with Cluster(NODES) as cluster, OwnRun(cluster, made, SMALL.name, STAGE, pace_s=PACE_S) as run:
        run.wait_steps(_WARM_STEPS, NODES)
        undisturbed = _rate(run, plan.undisturbed_s)
        begun = time.time()
        kills = _kill_again_and_again(cluster, run, plan, begun)
        ended = time.time()
        if (result := run.handle.result(0.0)) is not None:
            raise NotMeasured(f"the run ended: {result}")
        marks = read_marks(run.marks)
        done = completed(marks)
        incidents = [incident for incident in run.incidents() if not incident["planned"]]
        return {
            "undisturbed_per_s": undisturbed, "per_s": _committed(done, begun, ended) / (ended - begun),
            # By any rank: one that was struck after a step may not have come to say so, and the step counts.
            "steps_computed": len({(mark.era, mark.step) for mark in marks if begun < mark.at <= ended}),
            "kills": kills,
            "committed": _committed(done, begun, ended), "sources": [i["source"] for i in incidents],
            "by_minute": _by_minute(done, begun, ended), "incident_count": len(incidents),
        }  # fmt: skip


def _rate(run: OwnRun, window_s: float) -> float:
    """Steps per second while nothing happens, from the first to the last step that end within the window."""
    begun = time.time()
    run.until(lambda: time.time() > begun + window_s, "the undisturbed part to end", 2 * window_s)
    done = [step for step in completed(read_marks(run.marks)) if step.at > begun]
    if len({step.era for step in done}) != 1 or len(done) < 2:
        raise NotMeasured("the part without kills was not undisturbed")
    return (len(done) - 1) / (done[-1].at - done[0].at)


def _kill_again_and_again(cluster: Cluster, run: OwnRun, plan: Plan, begun: float) -> list[dict[str, Any]]:
    """What was struck and when. The one whose turn comes while no node but the head carries a rank is left out."""
    kills: list[dict[str, Any]] = []
    for number in range(int(plan.window_s / plan.every_s)):
        due = begun + number * plan.every_s
        run.until(lambda due=due: time.time() >= due, "the next kill to be due", 2 * plan.every_s)
        try:
            at, node = run.kill_node()
            kills.append({"at": round(at - begun, 2), "node": node})
        except (NotMeasured, ClusterError) as error:
            kills.append({"at": round(time.time() - begun, 2), "left_out": str(error)})
        cluster.heal()
    end = begun + plan.window_s
    run.until(lambda: time.time() >= end, "the window to end", 2 * plan.every_s)
    return kills


def _committed(done: list[StepDone], begun: float, ended: float) -> int:
    """Steps gained between the two times, less those that were lost again."""
    before = [step for step in done if step.at <= begun]
    until = [step for step in done if step.at <= ended]
    return _furthest(until) - _furthest(before)


def _furthest(done: list[StepDone]) -> int:
    """The step at which the run stands: the last one that was done, however far an earlier era had come."""
    return done[-1].step if done else 0


def _by_minute(done: list[StepDone], begun: float, ended: float) -> list[int]:
    minutes = int((ended - begun) / 60)
    return [_committed(done, begun + 60 * minute, begun + 60 * (minute + 1)) for minute in range(minutes)]


def _report(name: str, target: Target, found: dict[str, Any]) -> list[Figure]:
    share = 100 * found["per_s"] / found["undisturbed_per_s"]
    kept = 100 * found["committed"] / max(1, found["steps_computed"])
    struck = sum("node" in kill for kill in found["kills"])
    return [
        Figure(CASE, name, "%", (share,), targets=(target,), notes=(*NOTES, f"{name}: {struck} kills"), details=found),
        Figure(CASE, f"{name}: of the steps computed", "%", (kept,)),
    ]

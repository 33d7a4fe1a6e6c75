"""This project's recovery of a killed worker, with a warm spare too, and of a frozen node."""

from __future__ import annotations

from benchmarks.cases.recovery import Plan, measure_plans
from benchmarks.figures import Figure, Target
from benchmarks.options import Options


def measure(options: Options) -> list[Figure]:
    killed, frozen = options.pick(6, 1), options.pick(4, 1)
    wanted = (
        Plan("worker SIGKILL -> next step", "kill_worker", 2, "memory", killed, (Target("median", 3.0),)),
        Plan("node frozen -> next step", "freeze_node", 2, "memory", frozen, (Target("median", 4.0),)),
        Plan("worker SIGKILL with a warm spare -> next step", "kill_worker", 2, "memory", frozen,
             (Target("median", 1.5),), spares=1),
    )  # fmt: skip
    return measure_plans(options, wanted[:1] if options.quick else wanted)

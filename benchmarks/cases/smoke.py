"""One node lost, once, and the run ended: shows in half a minute that the benchmarks work."""

from __future__ import annotations

from benchmarks.cases.recovery import Plan, measure_plans
from benchmarks.figures import Figure
from benchmarks.options import Options


def measure(options: Options) -> list[Figure]:
    plan = Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", 2, "memory", repetitions=1, grows=False)
    return measure_plans(options, [plan])

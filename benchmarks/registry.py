"""The cases there are, in the order in which they run, with the time that each may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.figures import Figure
from benchmarks.options import Options


@dataclass(frozen=True)
class Case:
    """`module` has a function `measure(options) -> list[Figure]`. Minutes are those of two quiet cores.

    A peer needs packages that this project does not, and is left out of a quick run. One that is not `usual` runs only
    when it is asked for by name.
    """

    name: str
    module: str
    about: str
    minutes: float
    quick_minutes: float
    peer: bool = False
    usual: bool = True

    def expected_s(self, quick: bool) -> float:
        return 60.0 * (self.quick_minutes if quick else self.minutes)

    def enough_s(self, quick: bool) -> float:
        """After which no further repetition begins: a busy machine makes for fewer, not for a longer run."""
        return math.inf if quick else 1.2 * self.expected_s(quick)

    def limit_s(self, quick: bool) -> float:
        """Never below what a start on a busy machine may take."""
        return max(300.0, 2.0 * self.expected_s(quick))

    def load(self) -> Callable[[Options], list[Figure]]:
        measure: Callable[[Options], list[Figure]] = import_module(self.module).measure
        return measure


CASES = (
    Case("ray-train", "benchmarks.cases.ray_train", "Ray Train v2 elastic: a lost node", 2.5, 2.5, peer=True),
    Case("torchft", "benchmarks.cases.torchft", "torchft: a lost replica group", 1.0, 0.5, peer=True),
    Case("torchrun", "benchmarks.cases.torchrun", "torchrun elastic: a lost agent", 1.5, 1.5, peer=True),
    Case("recovery", "benchmarks.cases.recovery", "lost nodes, and scaling up when they are back", 40.0, 0.6),
    Case("workers", "benchmarks.cases.workers", "killed workers and frozen nodes", 6.0, 0.6),
    Case("starts", "benchmarks.cases.starts", "a new worker until it is ready, forked and importing", 5.0, 1.5),
    Case("steady", "benchmarks.cases.steady", "undisturbed training against plain DeepSpeed", 9.0, 0.7),
    Case("elsewhere", "benchmarks.cases.elsewhere", "a snapshot at every step next to an accelerator", 5.0, 0.7),
    Case("save", "benchmarks.cases.save", "stalls of durable saves against DCP's async_save", 1.5, 1.0, peer=True),
    Case(
        "reshard",
        "benchmarks.cases.reshard",
        "a checkpoint read at another world size, on another mesh",
        2.5,
        2.5,
        peer=True,
    ),
    Case("goodput", "benchmarks.cases.goodput", "steps that count, under a kill every 60 s and every 15 s", 21.5, 0.8),
    Case("data", "benchmarks.cases.data", "a streamed corpus: read alone, and next to training", 2.0, 0.5, peer=True),
    Case("restart", "benchmarks.cases.restart", "a controller restarts after a million steps", 6.0, 0.3),
    Case("placement", "benchmarks.cases.placement", "bytes over the network, 16 -> 15 nodes", 12.0, 4.0, usual=False),
    Case("audit", "benchmarks.cases.audit", "what audits of the optimizer cost a rank", 1.0, 0.2, usual=False),
    Case("watching", "benchmarks.cases.watching", "what ledger and gradient noise cost a step", 4.0, 0.5, usual=False),
    Case("scale", "benchmarks.cases.scale", "the control plane with simulated nodes, up to 10,000", 4.0, 0.1),
    Case("smoke", "benchmarks.cases.smoke", "one node lost, once", 0.5, 0.5, usual=False),
)


def find(name: str) -> Case:
    """Raises ValueError that names the cases there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"there is no case {name!r}; there are {', '.join(case.name for case in CASES)}")

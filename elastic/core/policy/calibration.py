"""Is a node as fast as the others of the run? What it measured when it joined, compared with what they measured.

Limits are learned from the fleet: a node differs when it is both far from the median in relation to it, and outside of
what the others scatter (median absolute deviations). No figure of any device is in here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastic.core.policy.hops import Hop, fit_hop
from elastic.core.settings import CalibrationSettings

# Fewer others have no median that means anything.
_FEWEST = 2
# Of a normal distribution, standard deviation over median absolute deviation.
_NORMAL = 1.4826
# Newest nodes that are compared with.
_KEPT = 100
# Slower disks and longer latencies are reported; no run is without a node for them.
_DECISIVE = ("gemm", "memory", "sending", "receiving")
HOST, ZONE, OTHER = "same host", "same zone", "other"


@dataclass(frozen=True)
class Calibration:
    """Of one node. `rates`: name -> per second, of "gemm" (FLOP/s), "memory" and "disk" (bytes/s). `partner` is the
    idle node with which `sent` and `received` were measured: (bytes, seconds of one way); `link` its class."""

    node: str
    rates: tuple[tuple[str, float], ...]
    partner: str = ""
    link: str = ""
    sent: tuple[tuple[int, float], ...] = ()
    received: tuple[tuple[int, float], ...] = ()

    @property
    def hops(self) -> dict[str, Hop]:
        """Latency and seconds per byte in each direction, fitted in relative error."""
        ways = {"sending": self.sent, "receiving": self.received}
        possible = {name: [point for point in points if min(point) > 0] for name, points in ways.items()}
        return {name: fit_hop(points) for name, points in possible.items() if len(points) > 1}

    @property
    def figures(self) -> dict[tuple[str, str], float]:
        """(name, link class or "") -> what is better when it is larger."""
        found = {(name, ""): rate for name, rate in self.rates}
        for name, hop in self.hops.items():
            if hop.beta_s_per_byte > 0:
                found[name, self.link] = 1 / hop.beta_s_per_byte
            if hop.alpha_s > 0:
                found[f"latency of {name}", self.link] = 1 / hop.alpha_s
        return found


@dataclass(frozen=True)
class Verdict:
    """`state` is "healthy", "slow" or "refused"; `reasons` say what is slower than in the fleet, and by how much."""

    state: str
    reasons: tuple[str, ...] = ()


def judge(own: Calibration, fleet: Sequence[Calibration], settings: CalibrationSettings) -> Verdict:
    """`fleet` are the other nodes. What too few of them have measured is not judged."""
    slow: list[str] = []
    refused: list[str] = []
    for (name, link), value in own.figures.items():
        others = [found[name, link] for other in fleet if (name, link) in (found := other.figures)]
        if len(others) < _FEWEST:
            continue
        usual = median(others)
        scatter = _NORMAL * median(abs(other - usual) for other in others)
        factor = usual / value if value > 0 else math.inf
        if factor < settings.slow_factor or usual - value < settings.deviations * scatter:
            continue
        what = f"{name}{f' ({link})' if link else ''} {factor:.2f} times as slow as the median of {len(others)} others"
        (refused if name in _DECISIVE and factor >= settings.refuse_factor else slow).append(what)
    state = "refused" if refused else "slow" if slow else "healthy"
    return Verdict(state, (*refused, *slow))


def remembered(known: tuple[Calibration, ...], new: Calibration) -> tuple[Calibration, ...]:
    """With the newest one of each node."""
    return (*(one for one in known if one.node != new.node), new)[-_KEPT:]


def described(own: Calibration) -> str:
    """For example "GEMM 45.2 GFLOP/s, memory 6.1 GB/s, disk 0.8 GB/s; same host, node ab12: 31 us + 2.1 GB/s out"."""
    units = {"gemm": "GFLOP/s", "memory": "GB/s", "disk": "GB/s"}
    told = ", ".join(f"{name} {rate / 1e9:.3g} {units.get(name, 'G/s')}" for name, rate in own.rates)
    ways = [
        f"{name} {1e6 * hop.alpha_s:.3g} us and {1e-9 / hop.beta_s_per_byte:.3g} GB/s"
        for name, hop in own.hops.items()
        if hop.beta_s_per_byte > 0
    ]
    return f"{told}; {own.link}, node {own.partner[:8]}: {', '.join(ways)}" if ways else told

"""Links that are emulated: what a message takes on them, by the step and by whether its ends share a node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.policy.hops import Hop, Islands


@dataclass(frozen=True)
class Phase:
    """From step `from_step` on, the first being 1. `node`: between two ranks of one node. `nodes`: from a node to all
    others, one link for all of its ranks."""

    name: str
    from_step: int
    node: Hop
    nodes: Hop


@dataclass(frozen=True)
class Links:
    """In phases, in the order of their steps."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, given: Sequence[Mapping[str, Any]]) -> Links:
        """From a job's `phases`. Raises UsageError with one sentence."""
        links = cls(tuple(_phase(one) for one in given))
        steps = [phase.from_step for phase in links.phases]
        if not steps or steps[0] != 1:
            raise UsageError(f"phases: the first begins with from_step 1, not {steps[0] if steps else 'none at all'}")
        late = next((after for before, after in pairwise(steps) if after <= before), None)
        if late is not None:
            raise UsageError(f"phases: from_step {late} does not come after the phase before it: {steps}")
        if len(set(links.names)) < len(steps):
            raise UsageError(f"phases: each has a name of its own, not {', '.join(links.names)}")
        return links

    @property
    def names(self) -> list[str]:
        return [phase.name for phase in self.phases]

    def at(self, step: int) -> Phase:
        """The phase of a step."""
        return next(phase for phase in reversed(self.phases) if phase.from_step <= step)


def message_s(phase: Phase, nbytes: float, same_node: bool) -> tuple[float, float]:
    """(seconds in which a message has its link, seconds more until it arrives). The link between nodes is the node's
    only one: messages that leave a node at the same time have it one after the other. Within a node each has its own.
    """
    link = phase.node if same_node else phase.nodes
    return link.beta_s_per_byte * nbytes, link.alpha_s


def all_reduce_s(phase: Phase, islands: Islands, nbytes: float) -> float:
    """Of the backend's own all-reduce, as a ring of all ranks in their order: 2 (p-1) messages of n/p, each as slow as
    the slowest link of the ring; a link between nodes is shared by the messages that leave its node."""
    homes = [islands.find(rank)[0] for rank in range(islands.ranks)]
    leaving = [home for rank, home in enumerate(homes) if home != homes[(rank + 1) % len(homes)]]
    most = max((leaving.count(home) for home in leaving), default=0)
    hops = [Hop(phase.nodes.alpha_s, most * phase.nodes.beta_s_per_byte)] if most else []
    if len(leaving) < len(homes):
        hops.append(phase.node)
    share = nbytes / islands.ranks
    return max(2 * (islands.ranks - 1) * hop.seconds(share) for hop in hops)


def _phase(given: Mapping[str, Any]) -> Phase:
    _keys("a phase", given, ("name", "from_step", "node", "nodes"))
    name, step = given["name"], given["from_step"]
    if not isinstance(step, int) or isinstance(step, bool):
        raise UsageError(f"phase {name!r}: from_step is a whole number, not {step!r}")
    return Phase(str(name), step, *(_hop(f"phase {name!r}, {kind}", given[kind]) for kind in ("node", "nodes")))


def _hop(where: str, given: Mapping[str, Any]) -> Hop:
    """`latency_ms` per message and `mb_per_s`, 10^6 bytes."""
    _keys(where, given, ("latency_ms", "mb_per_s"))
    latency, rate = (_number(where, key, given[key]) for key in ("latency_ms", "mb_per_s"))
    if latency < 0.0:
        raise UsageError(f"{where}: latency_ms is at least 0, not {latency:g}")
    if rate <= 0.0:
        raise UsageError(f"{where}: mb_per_s is above 0, not {rate:g}")
    return Hop(latency / 1e3, 1e-6 / rate)


def _number(where: str, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UsageError(f"{where}: {key} is a number, not {value!r}")
    return float(value)


def _keys(where: str, given: object, wanted: Iterable[str]) -> None:
    if not isinstance(given, Mapping) or set(given) != set(wanted):
        raise UsageError(f"{where} has the keys {', '.join(wanted)}, and no others; it is {given!r}")

"""Can the cluster ever hold a run's `min_workers`? A pure function of its nodes and of those an autoscaler may add.

The total resources of nodes count, not the free ones: another job releases its share some day. A slot that fits on no
node and on no node type of the autoscaler is refused; for anything else the run waits and reports the shortage.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elastic.core.wording import plural

Resources = Mapping[str, float]


class Supply(str, Enum):
    """How the cluster compares with the minimum that the run needs."""

    # The present nodes can hold the minimum.
    ENOUGH = "enough"
    # An autoscaler can bring what is missing.
    COMING = "coming"
    # Something is missing and no autoscaler is known to add it; an operator may add a node.
    MISSING = "missing"
    # The cluster can never hold it: the run is refused.
    NEVER = "never"


@dataclass(frozen=True)
class NodeType:
    """A kind of node that an autoscaler may start `max_count` of (None: no limit is known)."""

    name: str
    resources: Resources
    max_count: int | None = None


@dataclass(frozen=True)
class Cluster:
    """What is known of a cluster. `types` is None where an autoscaler does not say which nodes it could start.

    `nodes` are the whole resources of each living node; `started` names the type of those that an autoscaler started.
    """

    nodes: Mapping[str, Resources] = field(default_factory=dict)
    started: Mapping[str, str] = field(default_factory=dict)
    autoscaled: bool = False
    types: tuple[NodeType, ...] | None = None


@dataclass(frozen=True)
class Need:
    """What a run asks for: slots of `workers_per_slot` workers each, on one node, `min_slots` of them at least."""

    resources_per_worker: Resources
    workers_per_slot: int = 1
    min_slots: int = 1

    @property
    def slot(self) -> dict[str, float]:
        wanted = {name: count * self.workers_per_slot for name, count in self.resources_per_worker.items()}
        return {name: count for name, count in wanted.items() if count > 0}

    @property
    def who(self) -> str:
        return "a worker" if self.workers_per_slot == 1 else f"a slot of {self.workers_per_slot} workers, on one node,"


@dataclass(frozen=True)
class Judgement:
    """`sentence` names the shortage; empty if there is none."""

    supply: Supply
    sentence: str = ""


def judge(need: Need, cluster: Cluster) -> Judgement:
    """Nodes that an autoscaler is starting count through the limit of their type only."""
    slot, types = need.slot, cluster.types or ()
    here = sum(fits(slot, node) for node in cluster.nodes.values())
    if here >= need.min_slots:
        return Judgement(Supply.ENOUGH)
    if not here and not any(fits(slot, node_type.resources) for node_type in types):
        return _no_place(need, cluster)
    return _too_few(need, cluster, here)


def fits(slot: Resources, node: Resources) -> int:
    """How many such slots a node holds. A slot that needs no resources counts once."""
    if not slot:
        return 1
    # Tolerance for float sums: ten times 0.1 CPU must fit on 1 CPU.
    return min(int(node.get(name, 0.0) / count + 1e-9) for name, count in slot.items())


def _no_place(need: Need, cluster: Cluster) -> Judgement:
    """No node and no node type can hold a single slot."""
    what = f"{need.who} wants {_why(need.slot, cluster)}"
    if not cluster.autoscaled:
        return Judgement(Supply.NEVER, f"{what}, and there is no autoscaler to add one")
    if cluster.types is None:
        return Judgement(Supply.MISSING, f"{what}; its autoscaler does not report whether it has a larger node type")
    return Judgement(Supply.NEVER, f"{what}, and no node type of the autoscaler offers more")


def _why(slot: Resources, cluster: Cluster) -> str:
    """The resource that is short, and by how much."""
    nodes = [*cluster.nodes.values(), *(node_type.resources for node_type in cluster.types or ())]
    known = sorted({name for node in nodes for name in node if not _is_rays_own(name)})
    for name, count in slot.items():
        best = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if best <= 0.0:
            return f"{name}: {_number(count)}, which no node has{_hint(name, known)}"
        if best < count:
            largest = max((node.get(name, 0.0) for node in cluster.nodes.values()), default=0.0)
            return f"{name}: {_number(count)}, the largest node has {name}: {_number(largest)}"
    if not nodes:
        return f"{told(slot)}, and there is no node"
    # Each resource is available, but not all of them on one node.
    lacking = min(nodes, key=lambda node: sum(node.get(name, 0.0) < count for name, count in slot.items()))
    name = next(name for name, count in slot.items() if lacking.get(name, 0.0) < count)
    has = f"the closest node has {name}: {_number(lacking.get(name, 0.0))}"
    return f"{told(slot)} together, {has}"


def _is_rays_own(name: str) -> bool:
    """Resources that Ray itself adds: node names, placement groups' shares, and object store memory."""
    return ":" in name or "_group_" in name or name == "object_store_memory"


def _hint(name: str, known: list[str]) -> str:
    by_lower = {other.lower(): other for other in known}
    # The cutoff keeps CPU from being suggested for GPU.
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    if near:
        return f" (did you mean {by_lower[near[0]]}?)"
    return f" (there are {', '.join(known)})" if known else ""


def _too_few(need: Need, cluster: Cluster, here: int) -> Judgement:
    """Single slots fit, but fewer than the minimum."""
    slot, missing = need.slot, need.min_slots - here
    what = (
        f"the run needs {plural(need.min_slots, 'slot')} of {told(slot)} at least and the nodes have room for {here}: "
        f"{missing} short"
    )
    if not cluster.autoscaled:
        return Judgement(Supply.MISSING, f"{what}; there is no autoscaler, so nodes must be added by hand")
    if cluster.types is None:
        return Judgement(Supply.COMING, f"{what}; waiting for the autoscaler")
    limit = _limit(slot, cluster)
    if limit is not None and limit < need.min_slots:
        return Judgement(
            Supply.NEVER, f"{what}, and with every node that its autoscaler may start there is room for {limit}"
        )
    return Judgement(Supply.COMING, f"{what}; waiting for the autoscaler")


def _limit(slot: Resources, cluster: Cluster) -> int | None:
    """Slots that fit when every node type is at its limit; None without one."""
    types = cluster.types or ()
    names = {node_type.name for node_type in types}
    total = sum(fits(slot, node) for name, node in cluster.nodes.items() if cluster.started.get(name) not in names)
    for node_type in types:
        each = fits(slot, node_type.resources)
        if each and node_type.max_count is None:
            return None
        total += each * (node_type.max_count or 0)
    return total


def told(resources: Resources) -> str:
    """For example "CPU: 1, GPU: 8"."""
    return ", ".join(f"{name}: {_number(count)}" for name, count in resources.items()) or "nothing"


def _number(count: float) -> str:
    return f"{count:g}" if count < 1e6 else f"{int(count)}"

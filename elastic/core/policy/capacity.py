"""Can the cluster ever hold the workers that a run needs at least? A pure function of the nodes that are and may come.

Whole nodes are compared, not what is free on them: what another job uses now, it gives back some day. A slot that no
node can hold and that nobody could bring a node for is refused; anything else is waited for, and what is short is said.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Resources = Mapping[str, float]


class Outlook(str, Enum):
    # The nodes that are there can hold what the run needs at least.
    ENOUGH = "enough"
    # An autoscaler can bring what is missing.
    COMING = "coming"
    # Something is missing, and no autoscaler is known to add it; a node may still be added by hand.
    MISSING = "missing"
    # It cannot be had here: the run is refused.
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
    """`sentence` says what is short and by how much; empty where nothing is."""

    outlook: Outlook
    sentence: str = ""


def judge(need: Need, cluster: Cluster) -> Judgement:
    """What can be hoped for. Of nodes that are being started by an autoscaler only the limit of their type counts."""
    slot, types = need.slot, cluster.types or ()
    here = sum(fits(slot, node) for node in cluster.nodes.values())
    if here >= need.min_slots:
        return Judgement(Outlook.ENOUGH)
    if not here and not any(fits(slot, node_type.resources) for node_type in types):
        return _no_place(need, cluster)
    return _too_few(need, cluster, here)


def fits(slot: Resources, node: Resources) -> int:
    """How many such slots a node holds. A slot that wants nothing fits once."""
    if not slot:
        return 1
    # A tenth of a CPU ten times is a CPU.
    return min(int(node.get(name, 0.0) / count + 1e-9) for name, count in slot.items())


def _no_place(need: Need, cluster: Cluster) -> Judgement:
    """No node and no node type can hold a single slot."""
    what = f"{need.who} wants {_why(need.slot, cluster)}"
    if not cluster.autoscaled:
        return Judgement(Outlook.NEVER, f"{what}, and no autoscaler is there to bring another one")
    if cluster.types is None:
        unknown = "whether its autoscaler has a type of node that can, it does not say"
        return Judgement(Outlook.MISSING, f"{what}; {unknown}")
    return Judgement(Outlook.NEVER, f"{what}, and no node type of the autoscaler offers more")


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
    # Each resource can be had, but not all of them on one node.
    lacking = min(nodes, key=lambda node: sum(node.get(name, 0.0) < count for name, count in slot.items()))
    name = next(name for name, count in slot.items() if lacking.get(name, 0.0) < count)
    has = f"the node that comes nearest has {name}: {_number(lacking.get(name, 0.0))}"
    return f"{told(slot)} together, {has}"


def _is_rays_own(name: str) -> bool:
    """Names of nodes, what placement groups have taken, and what nobody asks for."""
    return ":" in name or "_group_" in name or name == "object_store_memory"


def _hint(name: str, known: list[str]) -> str:
    by_lower = {other.lower(): other for other in known}
    # A GPU is no slip of a CPU.
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    if near:
        return f" (did you mean {by_lower[near[0]]}?)"
    return f" (there are {', '.join(known)})" if known else ""


def _too_few(need: Need, cluster: Cluster, here: int) -> Judgement:
    """Some place fits, but those that are there are not enough."""
    slot, missing = need.slot, need.min_slots - here
    what = (
        f"the run needs {_slots(need.min_slots)} of {told(slot)} at least and the nodes have room for {here}: "
        f"{missing} short"
    )
    if not cluster.autoscaled:
        return Judgement(Outlook.MISSING, f"{what}; no autoscaler is there to bring nodes, they can be added by hand")
    if cluster.types is None:
        return Judgement(Outlook.COMING, f"{what}; the autoscaler is asked for more")
    limit = _limit(slot, cluster)
    if limit is not None and limit < need.min_slots:
        return Judgement(Outlook.NEVER, f"{what}, and with all that its autoscaler may start there is room for {limit}")
    return Judgement(Outlook.COMING, f"{what}; the autoscaler is asked for more")


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


def _slots(count: int) -> str:
    return f"{count} slot{'s' * (count != 1)}"


def told(resources: Resources) -> str:
    """For example "CPU: 1, GPU: 8"."""
    return ", ".join(f"{name}: {_number(count)}" for name, count in resources.items()) or "nothing"


def _number(count: float) -> str:
    return f"{count:g}" if count < 1e6 else f"{int(count)}"

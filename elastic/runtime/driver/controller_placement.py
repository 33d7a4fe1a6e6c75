"""Placement of the controller.

The controller survives the loss of its node: Ray detects it (after 15 s by default) and restarts the controller on
another node, where it replays its journal. But a recovery waits for that, and the controller does not survive the loss
of its cluster. So it should be neither on the head, which may be restarted while all others continue, nor on a
node with workers, which may be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEAD = "node:__internal_head__"


@dataclass(frozen=True)
class Node:
    """A living node. `resources` are its total resources by name."""

    node_id: str
    address: str
    resources: Mapping[str, float]

    @classmethod
    def from_ray(cls, entry: Mapping[str, Any]) -> Node:
        """From an entry of `ray.nodes()`."""
        return cls(entry["NodeID"], entry["NodeManagerAddress"], entry["Resources"])

    @property
    def head(self) -> bool:
        return HEAD in self.resources

    def holds(self, wanted: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= count for name, count in wanted.items())


@dataclass(frozen=True)
class Place:
    """`only`: on no other node, even after a restart."""

    node_id: str
    only: bool
    reason: str


def choose(nodes: Sequence[Node], own: str, per_worker: Mapping[str, float]) -> Place:
    """`own` is the driver's node, as far as known; `per_worker` are the resources of one worker.

    1. All nodes are on one machine: the head. It cannot fail without the whole cluster, and a driver there cannot tell
    its own node.
    2. The driver's own node, unless that is the head.
    3. A node on which no worker fits, then any other except the head; the smallest of these.
    """
    head = next((node.node_id for node in nodes if node.head), None)
    if len({node.address for node in nodes}) == 1 and head is not None:
        return Place(head, True, "all nodes are on one machine")
    if own != head:
        return Place(own, False, "it is the driver's node")
    others = (node for node in nodes if not node.head)
    best = min(others, key=lambda node: (node.holds(per_worker), _size(node), node.node_id))
    return Place(best.node_id, False, "it is not the head" if best.holds(per_worker) else "no worker fits there")


def _size(node: Node) -> tuple[float, float, float]:
    """Accelerators (of any name) count first, then CPUs and memory."""
    plain = {"CPU", "memory", "object_store_memory"}
    extra = sum(count for name, count in node.resources.items() if name not in plain and not name.startswith("node:"))
    return extra, node.resources.get("CPU", 0.0), node.resources.get("memory", 0.0)

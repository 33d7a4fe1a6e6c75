"""The cloud of an autoscaled cluster, as its keeper plays it: machines asked for, granted, lost and given back.

Ray's autoscaler talks to it through `elastic_cluster.local.autoscaled_provider`. What is asked for and cannot be
granted waits, as a pod waits for a machine: the autoscaler may take its wish back meanwhile.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_cluster.local.node_table import Entry, Nodes
from elastic_cluster.source import ClusterError, NodeInfo, NodeState

# What Ray's autoscaler calls the type of the head, and what this cluster calls the type of all others.
HEAD_TYPE = "ray.head.default"
WORKER_TYPE = "worker"


@dataclass
class CloudPlan:
    """`at_hand` nodes are available, up to `max_nodes`; one more every `every_s` seconds (None: only when offered)."""

    options: Mapping[str, Any]
    max_nodes: int
    at_hand: int
    every_s: float | None = None


class Cloud:
    """`start` has a node's raylet started; `remove` takes a running node away in good order. Neither raises for a node
    that ends meanwhile."""

    def __init__(
        self,
        nodes: Nodes,
        plan: CloudPlan,
        start: Callable[[Entry], None],
        remove: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.at_hand = plan.at_hand
        self._nodes = nodes
        self._plan = plan
        self._start = start
        self._remove = remove
        self._clock = clock
        self._waiting: list[Entry] = []
        self._tags: dict[str, Mapping[str, str]] = {}
        self._numbers = itertools.count(1)
        self._next_at = clock() + (plan.every_s or 0.0)

    # --- for the autoscaler ---

    def launch(self, count: int, tags: Mapping[str, str]) -> list[str]:
        """Ask for nodes; returns their names at once."""
        names = [f"node-{next(self._numbers)}" for _ in range(count)]
        for name in names:
            environment = {"RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": WORKER_TYPE}
            self._waiting.append(self._nodes.define(name, False, {**self._plan.options, "env_vars": environment}))
            self._tags[name] = dict(tags)
        self.tick()
        return names

    def instances(self) -> dict[str, dict[str, Any]]:
        """Every node that is asked for or there. One that is lost is not: a cloud knows that a machine is gone."""
        return {
            entry.name: {"running": entry.state is NodeState.ALIVE, "tags": self._tags[entry.name]}
            for entry in self._nodes.entries.values()
            if not entry.head and entry.state is not NodeState.LOST
        }

    def terminate(self, name: str) -> None:
        """Idempotent. A node that is still being started is refused, and asked for again by the autoscaler."""
        entry = self._nodes.entries.get(name)
        if entry is None or entry.state is NodeState.LOST:
            return
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._nodes.lost(entry)
        elif entry.state is NodeState.STARTING:
            raise ClusterError(f"{name} is being started and cannot be given back yet")
        else:
            self._remove(name)

    # --- for tests and demos ---

    def offer(self, count: int) -> int:
        """From now on this many nodes are available, including the present ones; none of those is removed."""
        if not 0 <= count <= self._plan.max_nodes:
            raise ClusterError(f"the cluster was started for {self._plan.max_nodes} nodes, so not for {count}")
        self.at_hand = count
        self.tick()
        return count

    def one_more(self) -> NodeInfo:
        """One more node is available from now on; returns the node that starts now, or a note about the next one."""
        if self.at_hand >= self._plan.max_nodes:
            raise ClusterError(f"the cluster has at most {self._plan.max_nodes} nodes, and all are available already")
        first = self._waiting[0] if self._waiting else None
        self.at_hand += 1
        self.tick()
        return NodeInfo("one more, when it is asked for", NodeState.STARTING) if first is None else first.info(())

    def machine_lost(self) -> None:
        """A killed node's machine is gone: one fewer is available."""
        self.at_hand = max(0, self.at_hand - 1)
        self._next_at = self._clock() + (self._plan.every_s or 0.0)

    def tick(self) -> None:
        """Start the waiting nodes that are available by now."""
        while self._plan.every_s and self._clock() >= self._next_at:
            self._next_at += self._plan.every_s
            self.at_hand = min(self._plan.max_nodes, self.at_hand + 1)
        # Before the head is up there is nothing that a node could join.
        while self._waiting and self._nodes.address and self._used() < self.at_hand:
            self._start(self._waiting.pop(0))

    def _used(self) -> int:
        taken = (entry for entry in self._nodes.entries.values() if not entry.head and entry not in self._waiting)
        return sum(entry.state is not NodeState.LOST for entry in taken)

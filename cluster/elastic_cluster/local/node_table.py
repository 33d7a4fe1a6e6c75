"""The keeper's books: which nodes there are, and which processes belong to which."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_cluster.local import processes
from elastic_cluster.local.processes import Process
from elastic_cluster.source import ClusterError, NodeInfo, NodeState

# Set for a raylet and so for every process below it: "<cluster>/<node>/<life>".
TAG = "LOCAL_CLUSTER_NODE"


@dataclass
class Entry:
    """One name, through all its lives. All processes of the node are `roots` (its init, the GCS) or below them."""

    name: str
    head: bool
    options: Mapping[str, Any]
    state: NodeState = NodeState.STARTING
    lives: int = 1
    node_id: str = ""
    raylet_pid: int = 0
    roots: tuple[Process, ...] = ()
    lost_at: int = 0
    # The process of Ray's control store, on the head; None while it is away.
    control_store: Process | None = None
    control_store_starting: bool = False

    @property
    def starting(self) -> bool:
        return self.state is NodeState.STARTING or self.control_store_starting

    def info(self, pids: tuple[int, ...]) -> NodeInfo:
        resources = {"CPU": self.options["num_cpus"], "GPU": self.options["num_gpus"], **self.options["resources"]}
        return NodeInfo(
            name=self.name,
            state=self.state,
            head=self.head,
            node_id=self.node_id,
            raylet_pid=self.raylet_pid,
            pids=pids,
            lives=self.lives,
            resources={key: value for key, value in resources.items() if value},
            labels=self.options["labels"],
        )


@dataclass
class Nodes:
    """`cluster` is unique on this machine; `keeper_pid` is the root of the tree that all processes are in."""

    cluster: str
    keeper_pid: int
    entries: dict[str, Entry] = field(default_factory=dict)
    address: str = ""
    dashboard: str = ""
    _losses: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def define(self, name: str, head: bool, options: Mapping[str, Any]) -> Entry:
        if name in self.entries:
            raise ClusterError(f"there is a node {name} already")
        entry = self.entries[name] = Entry(name, head, options)
        return entry

    def revive(self, name: str | None) -> Entry:
        """A lost node made ready to be started again; without a name the one lost longest, or else a new one."""
        lost = sorted((e for e in self.entries.values() if e.state is NodeState.LOST), key=lambda e: e.lost_at)
        if any(entry.head for entry in lost):
            raise ClusterError("the head of the cluster was lost, so no node can join any more: start a new cluster")
        if name is not None:
            lost = [entry for entry in lost if entry.name == name]
            if name in self.entries and not lost:
                raise ClusterError(f"{name} is {self.entries[name].state.value}; only a lost node can be brought back")
        if lost:
            entry = lost[0]
            entry.lives += 1
            entry.state, entry.node_id, entry.raylet_pid, entry.roots = NodeState.STARTING, "", 0, ()
            return entry
        last = list(self.entries.values())[-1]
        return self.define(name or self._free_name(), False, {k: v for k, v in last.options.items() if k[0] != "_"})

    def _free_name(self) -> str:
        return next(name for i in itertools.count() if (name := f"node-{i}") not in self.entries)

    def running(self, name: str) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            raise ClusterError(f"there is no node {name!r}; there are {', '.join(self.entries)}")
        if entry.state not in (NodeState.ALIVE, NodeState.FROZEN):
            raise ClusterError(f"{name} is {entry.state.value}")
        return entry

    def lost(self, entry: Entry) -> None:
        entry.state, entry.lost_at = NodeState.LOST, next(self._losses)

    def tag(self, entry: Entry) -> str:
        return f"{self.cluster}/{entry.name}/{entry.lives}"

    def everything(self) -> list[Process]:
        """All processes of the cluster but the keeper."""
        found = processes.table()
        return [found[pid] for pid in processes.descendants([self.keeper_pid], found)]

    def members(self, entry: Entry) -> list[Process]:
        """The processes of one node, zombies included."""
        found = processes.table()
        # By start time too: the pid of a process that ended may have been given to one of another node.
        roots = {p.pid for p in entry.roots if p.pid in found and found[p.pid].start_ticks == p.start_ticks}
        return [found[pid] for pid in roots | processes.descendants(roots, found)]

    def of_pid(self, pid: int) -> Entry:
        """The node a process belongs to; ClusterError where it belongs to none, so that no other can be killed."""
        for entry in self.entries.values():
            if any(process.pid == pid and not process.zombie for process in self.members(entry)):
                return entry
        raise ClusterError(f"process {pid} belongs to no node of this cluster")

    def info(self, entry: Entry, pids: set[int] | None = None) -> NodeInfo:
        if pids is None:
            pids = {process.pid for process in self.members(entry) if not process.zombie}
        return entry.info(tuple(sorted(pids)))

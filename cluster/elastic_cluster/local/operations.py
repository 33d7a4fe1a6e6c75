"""What can be done to a node that runs. Each call blocks until it is done, which takes milliseconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection

from elastic_cluster.local import processes
from elastic_cluster.local.features import DURABLE
from elastic_cluster.local.node_table import Entry, Nodes
from elastic_cluster.source import ClusterError, NodeInfo, NodeState

_KILL_LIMIT_S = 10.0
_LEAVE_LIMIT_S = 15.0


class Operations:
    """`reap` collects dead children of the caller, so that they do not stay in the process table."""

    def __init__(self, nodes: Nodes, reap: Callable[[], object], features: Collection[str] = ()) -> None:
        self._features = features
        self._nodes = nodes
        self._reap = reap

    def nodes(self) -> list[NodeInfo]:
        self._notice()
        return [self._nodes.info(entry) for entry in self._nodes.entries.values()]

    def _notice(self) -> None:
        """A node whose raylet has ended by itself is lost, though its other processes may still be ending."""
        for entry in self._nodes.entries.values():
            if entry.state in (NodeState.ALIVE, NodeState.FROZEN):
                raylet = processes.read(entry.raylet_pid)
                if raylet is None or raylet.zombie:
                    self._nodes.lost(entry)

    def bury_lost(self) -> None:
        """End the remaining processes of lost nodes, so that a revived node shares nothing with them."""
        self._notice()
        for entry in self._nodes.entries.values():
            if entry.state is NodeState.LOST:
                self._kill_members(entry)

    def kill_node(self, name: str) -> NodeInfo:
        """SIGKILL every process of the node at one instant. Unlike with a lost machine its sockets are closed."""
        return self._end(self._nodes.running(name))

    def remove_node(self, name: str) -> NodeInfo:
        """A raylet answers SIGTERM by leaving the node table. What it leaves behind is killed."""
        entry = self._nodes.running(name)
        if entry.head:
            raise ClusterError(f"{name} is the head, without which the cluster cannot run: use shutdown")
        if entry.state is NodeState.FROZEN:
            raise ClusterError(f"{name} is frozen and cannot leave in good order: thaw it first, or kill it")
        pids = {process.pid for process in self._nodes.members(entry)}
        self._signal_and_wait(entry.raylet_pid, signal.SIGTERM, f"the raylet of {name} to leave")
        self._end(entry)
        return self._nodes.info(entry, pids)

    def freeze_node(self, name: str) -> NodeInfo:
        """SIGSTOP every process of the node."""
        entry = self._nodes.running(name)
        deadline = time.monotonic() + _KILL_LIMIT_S
        # Again and again: a process that was not stopped yet may have forked.
        while moving := [p for p in self._nodes.members(entry) if not p.stopped and not p.zombie]:
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {_KILL_LIMIT_S:g} s for the processes of {name} to stop")
            for process in moving:
                processes.send(process, signal.SIGSTOP)
            time.sleep(0.002)
        entry.state = NodeState.FROZEN
        return self._nodes.info(entry)

    def thaw_node(self, name: str) -> NodeInfo:
        """SIGCONT every process of the node."""
        entry = self._nodes.running(name)
        for process in self._nodes.members(entry):
            processes.send(process, signal.SIGCONT)
        entry.state = NodeState.ALIVE
        return self._nodes.info(entry)

    def kill_worker(self, pid: int) -> NodeInfo:
        entry = self._nodes.of_pid(pid)
        if pid == entry.raylet_pid or any(pid == root.pid for root in entry.roots):
            raise ClusterError(f"process {pid} runs {entry.name} itself and is no worker: use kill_node")
        return self.kill_process(pid)

    def kill_process(self, pid: int) -> NodeInfo:
        """SIGKILL one process that belongs to a node. A raylet killed so takes its workers with it, in its own time."""
        entry = self._nodes.of_pid(pid)
        self._signal_and_wait(pid, signal.SIGKILL, f"process {pid} to be gone")
        return self._nodes.info(entry, {pid})

    def kill_control_store(self) -> NodeInfo:
        """SIGKILL Ray's control store (the GCS), and nothing else; returns the head."""
        head, store = self._control_store()
        if DURABLE not in self._features:
            raise ClusterError("this cluster does not keep its control store: start it with durable_control_store=True")
        if store is None:
            raise ClusterError("the control store is away already")
        self._signal_and_wait(store.pid, signal.SIGKILL, "the control store to be gone")
        return self._nodes.info(head, {store.pid})

    def head_without_control_store(self) -> Entry:
        """The head, whose control store may be started. ClusterError where one runs, or is being started."""
        head, store = self._control_store()
        if store is not None or head.control_store_starting:
            raise ClusterError("the control store is there: only one that was killed can be started again")
        return head

    def check_control_store(self) -> None:
        """ClusterError where no node could join."""
        head = any(entry.head and entry.state is NodeState.ALIVE for entry in self._nodes.entries.values())
        if head and self._control_store()[1] is None:
            raise ClusterError("no node can join while the control store is away: restart it first")

    def _control_store(self) -> tuple[Entry, processes.Process | None]:
        """The head, and the process of its control store if that lives."""
        head = next((entry for entry in self._nodes.entries.values() if entry.head), None)
        if head is None or head.state is not NodeState.ALIVE:
            raise ClusterError("the cluster has no head that is alive")
        known = head.control_store
        now = processes.read(known.pid) if known is not None else None
        if known is None or now is None or now.zombie or now.start_ticks != known.start_ticks:
            head.control_store = None
        return head, head.control_store

    def _end(self, entry: Entry) -> NodeInfo:
        killed = self._kill_members(entry)
        self._nodes.lost(entry)
        return self._nodes.info(entry, killed)

    def _kill_members(self, entry: Entry) -> set[int]:
        seen: set[tuple[int, int]] = set()

        def members() -> list[processes.Process]:
            # With its init a node's tree is gone, though what was below may still be on its way out.
            seen.update((process.pid, process.start_ticks) for process in self._nodes.members(entry))
            return [now for pid, ticks in seen if (now := processes.read(pid)) is not None and now.start_ticks == ticks]

        return processes.kill_all(members, self._reap, _KILL_LIMIT_S)

    def _signal_and_wait(self, pid: int, number: signal.Signals, awaited: str) -> None:
        process = processes.read(pid)
        if process is None:
            return
        processes.send(process, number)
        deadline = time.monotonic() + _LEAVE_LIMIT_S
        while (now := processes.read(pid)) is not None and now.start_ticks == process.start_ticks and not now.zombie:
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {_LEAVE_LIMIT_S:g} s for {awaited}")
            self._reap()
            time.sleep(0.005)

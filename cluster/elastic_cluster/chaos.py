"""Faults by step: a plan as pure data, and an injector that carries its faults out on a cluster.

kill-node@step=40,add-node@step=80          the last node that is no head, then the lost one back
drain-node@step=40                          a notice; Ray ends the node when nothing is there
kill-control-store@step=40,restart-control-store@step=60
freeze-node:node-2@step=10                  a node by name, or by number: freeze-node:2@step=10
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from typing_extensions import assert_never

from elastic_cluster.source import ClusterError, NodeInfo, NodeState


class Action(str, Enum):
    KILL_NODE = "kill-node"
    ADD_NODE = "add-node"
    FREEZE_NODE = "freeze-node"
    THAW_NODE = "thaw-node"
    DRAIN_NODE = "drain-node"
    KILL_WORKER = "kill-worker"
    KILL_CONTROLLER = "kill-controller"
    KILL_CONTROL_STORE = "kill-control-store"
    RESTART_CONTROL_STORE = "restart-control-store"


# There is one of each in a cluster.
_ONLY_ONE = {Action.KILL_CONTROLLER, Action.KILL_CONTROL_STORE, Action.RESTART_CONTROL_STORE}
_FAULT = re.compile(r"(?P<action>[^:@]*)(:(?P<target>[^@]*))?(@(?P<key>[^=]*)=(?P<value>.*))?")


@dataclass(frozen=True)
class Fault:
    """`target` is a node's name or number; for kill-worker it is what the caller's hook understands, say a rank."""

    action: Action
    step: int
    target: str | None = None

    def __str__(self) -> str:
        target = "" if self.target is None else f":{self.target}"
        return f"{self.action.value}{target}@step={self.step}"


@dataclass(frozen=True)
class Chaos:
    """The faults still to come, in the order of their steps; those of one step as they were written."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Chaos:
        """ValueError, with the nearest valid word, for whatever is not a fault."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return cls(tuple(sorted(map(_parse_fault, parts), key=lambda fault: fault.step)))

    @property
    def strikes_control_store(self) -> bool:
        return any(fault.action is Action.KILL_CONTROL_STORE for fault in self.faults)

    def due(self, step: int) -> tuple[tuple[Fault, ...], Chaos]:
        """The faults of step `step` and of any before it that was passed over, and the plan without them."""
        now = tuple(fault for fault in self.faults if fault.step <= step)
        return now, Chaos(self.faults[len(now) :])

    def __str__(self) -> str:
        return ",".join(map(str, self.faults))


def _parse_fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    actions = [action.value for action in Action]
    if match is None or match["action"] not in actions:
        word = text if match is None else match["action"]
        raise ValueError(f"{word!r} in {text!r} is no fault; {_nearest(word, actions)}")
    if match["key"] is None:
        raise ValueError(f"{text!r} does not say when: write {text}@step=N")
    if match["key"] != "step":
        raise ValueError(f"{match['key']!r} in {text!r} is no key; {_nearest(match['key'], ['step'])}")
    if not re.fullmatch(r"[0-9]+", match["value"]):
        raise ValueError(f"the step in {text!r} is not a whole number: {match['value']!r}")
    action, target = Action(match["action"]), match["target"]
    if target == "":
        raise ValueError(f"{text!r} names no target after the colon")
    if target is not None and action in _ONLY_ONE:
        what = action.value.split("-", 1)[1].replace("-", " ")
        raise ValueError(f"{text!r}: there is one {what}, so {action.value} takes no target")
    return Fault(action, int(match["value"]), target)


def _nearest(word: str, valid: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(word, valid, n=1, cutoff=0.0)[0]
    return f"the nearest of {', '.join(valid)} is {nearest!r}"


class Breakable(Protocol):
    """The part of `LocalCluster` that the injector uses. Each call returns when the fault is done."""

    def nodes(self) -> tuple[NodeInfo, ...]: ...

    def kill_node(self, name: str) -> NodeInfo: ...

    def add_node(self, name: str | None = None) -> NodeInfo: ...

    def freeze_node(self, name: str) -> NodeInfo: ...

    def thaw_node(self, name: str) -> NodeInfo: ...

    def drain_node(self, name: str) -> NodeInfo: ...

    def kill_worker(self, pid: int) -> NodeInfo: ...

    def kill_control_store(self) -> NodeInfo: ...

    def restart_control_store(self) -> NodeInfo: ...


@dataclass(frozen=True)
class Injector:
    """Carries out faults. The pids of workers and of the controller are the caller's knowledge, so it gives the hooks.

    `worker_pid(target, node)` gets the fault's target and, if that is None, the node chosen; it returns the pid of one
    worker. `controller_pid()` returns the controller's. `carrying`, for node faults without a target, is asked for
    the nodes (names or Ray node ids) that carry workers; None: any node will do.
    """

    cluster: Breakable
    worker_pid: Callable[[str | None, NodeInfo | None], int] | None = None
    controller_pid: Callable[[], int] | None = None
    carrying: Callable[[], Collection[str]] | None = None

    def apply(self, fault: Fault) -> NodeInfo:
        """The node it was done to. ClusterError where there is nothing to do it to."""
        nodes = self.cluster.nodes()
        match fault.action:
            case Action.KILL_NODE:
                return self.cluster.kill_node(self._victim(nodes, fault).name)
            case Action.FREEZE_NODE:
                return self.cluster.freeze_node(self._victim(nodes, fault).name)
            case Action.DRAIN_NODE:
                return self.cluster.drain_node(self._victim(nodes, fault).name)
            case Action.THAW_NODE:
                return self.cluster.thaw_node(frozen(nodes, fault.target).name)
            case Action.ADD_NODE:
                return self.cluster.add_node(None if fault.target is None else node_name(fault.target))
            case Action.KILL_WORKER:
                if self.worker_pid is None:
                    raise ClusterError(f"{fault}: the workers of the run are not known here")
                node = None if fault.target is not None else self._victim(nodes, fault)
                return self.cluster.kill_worker(self.worker_pid(fault.target, node))
            case Action.KILL_CONTROLLER:
                if self.controller_pid is None:
                    raise ClusterError(f"{fault}: the controller of the run is not known here")
                return self.cluster.kill_worker(self.controller_pid())
            case Action.KILL_CONTROL_STORE:
                return self.cluster.kill_control_store()
            case Action.RESTART_CONTROL_STORE:
                return self.cluster.restart_control_store()
            case _:
                assert_never(fault.action)

    def _victim(self, nodes: Sequence[NodeInfo], fault: Fault) -> NodeInfo:
        return victim(nodes, fault.target, None if self.carrying is None else self.carrying())


def node_name(target: str) -> str:
    """A number stands for the node of that number."""
    return f"node-{target}" if target.isdecimal() else target


def victim(nodes: Sequence[NodeInfo], target: str | None, carrying: Collection[str] | None) -> NodeInfo:
    """The node that a fault strikes: the target; else the last live node that is no head and carries workers.

    The head is struck only by name, and a node that carries none only if the caller does not say which do. Workers
    all being on the head is no reason to strike another: that would show nothing.
    """
    if target is not None:
        found = [node for node in nodes if node.name == node_name(target)]
        if not found:
            raise ClusterError(f"there is no node {target!r}; there are {', '.join(node.name for node in nodes)}")
        return found[0]
    live = [node for node in nodes if node.state is NodeState.ALIVE and not node.head]
    if carrying is not None:
        live = [node for node in live if node.name in carrying or node.node_id in carrying]
    if not live:
        which = "is alive" if carrying is None else "is alive and carries workers"
        raise ClusterError(f"no node but the head {which}; the head is struck only when it is named")
    return live[-1]


def frozen(nodes: Sequence[NodeInfo], target: str | None) -> NodeInfo:
    """The node to thaw: the target, else the last one frozen in the order of names."""
    if target is not None:
        return victim(nodes, target, None)
    found = [node for node in nodes if node.state is NodeState.FROZEN]
    if not found:
        raise ClusterError("no node is frozen")
    return found[-1]

"""Telling Ray that a node is about to go away, as a cloud's preemption notice does.

Ray puts nothing new on such a node and ends it as soon as nothing runs there. At the deadline Ray does nothing: it is
whoever gave the notice who then takes the node away. Every private use of Ray for it is in this module.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_cluster.source import ClusterError

_CALL_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 5.0


@dataclass(frozen=True)
class RayNode:
    """One living node of a Ray cluster. `name` is what `ray start --node-name` gave it, else its address."""

    node_id: str
    name: str
    address: str


def drain(address: str, node: str, notice_s: float, why: str) -> RayNode:
    """Ask the cluster at `address` (of its control store, host:port) to drain the node that `node` names.

    `notice_s` seconds from now the node will be gone. Raises ClusterError: no cluster, no such node, not accepted.
    """
    if notice_s <= 0:
        raise ClusterError(f"a notice of {notice_s:g} s is none: give the node some seconds")
    client = _client(address)
    found = choose(living(client), node)
    from ray.core.generated import autoscaler_pb2

    deadline_ms = int((time.time() + notice_s) * 1000)
    # As a preemption, which a busy node takes; as idle it would refuse.
    reasons: Any = autoscaler_pb2
    reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal = client.drain_node(found.node_id, reason, why, deadline_ms)
    if not accepted:
        raise ClusterError(f"node {found.name} cannot be drained: {refusal}")
    return found


def choose(nodes: Sequence[RayNode], wanted: str) -> RayNode:
    """The one node with that name, address, or beginning of an id (at least 4 digits). Raises ClusterError."""
    by_name = [node for node in nodes if wanted in (node.name, node.address)]
    found = by_name or [node for node in nodes if len(wanted) >= 4 and node.node_id.startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node.name} ({node.node_id[:8]})" for node in nodes)
    how_many = "no living node" if not found else f"{len(found)} nodes"
    raise ClusterError(f"{how_many} of the cluster can be meant by {wanted!r}; there are {known or 'none'}")


def _client(address: str) -> Any:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without types

    host, _, port = address.rpartition(":")
    try:
        # Ray's client retries for half a minute if no server listens.
        socket.create_connection((host, int(port)), _CONNECT_LIMIT_S).close()
        return GcsClient(address=address)
    except Exception as error:  # the compiled client may raise anything
        raise ClusterError(f"no Ray cluster answers at {address}: {_line(error)}") from error


def living(client: Any) -> list[RayNode]:
    """The cluster's living nodes. Raises ClusterError."""
    try:
        table: Mapping[Any, Any] = client.get_all_node_info(timeout=_CALL_LIMIT_S)
    except Exception as error:  # as above
        raise ClusterError(f"the cluster does not say which nodes it has: {_line(error)}") from error
    alive = [info for info in table.values() if info.state == 0]
    nodes = [
        RayNode(info.node_id.hex(), info.node_name or info.node_manager_address, info.node_manager_address)
        for info in alive
    ]
    return sorted(nodes, key=lambda node: node.name)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

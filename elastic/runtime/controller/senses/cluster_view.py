"""The cluster as Ray's control store describes it: its nodes, their free resources, and its autoscaler's activity.

This is the only module with Ray's private calls for it. Ray's own autoscaler (v2) and `ray status` use the same calls;
an autoscaler of version 1 reports nothing there and counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without types
from ray.core.generated import autoscaler_pb2 as _generated

from elastic.core.policy.capacity import Cluster, NodeType, Resources

# The generated stubs lack many of the messages.
_messages: Any = _generated
_LIMIT_S = 5.0
_GONE = ("DEAD", "DRAINING")


@dataclass(frozen=True)
class ClusterView:
    """`free` are each node's free resources; `arriving` counts nodes that the autoscaler has requested; `demand` are
    the bundles of all pending placement groups, of this run and of others."""

    cluster: Cluster
    free: Mapping[str, Resources] = field(default_factory=dict)
    arriving: int = 0
    demand: tuple[Resources, ...] = ()


class ClusterProbe:
    """Reads the state of the cluster that this process has joined. Blocks: not for the event loop."""

    def __init__(self) -> None:
        # One client is enough: it keeps its connection.
        self._client: Any = GcsClient(address=ray.get_runtime_context().gcs_address)

    def __call__(self) -> ClusterView:
        """Raises RayError, OSError or RuntimeError while the control store is away."""
        reply = _messages.GetClusterStatusReply()
        reply.ParseFromString(self._client.get_cluster_status(timeout_s=_LIMIT_S))
        return view_of(reply, _types())


def view_of(reply: Any, types: tuple[NodeType, ...] | None) -> ClusterView:
    """`types` as in `Cluster`. An autoscaler counts only if it has started nodes or lists the types that it can
    start: Ray also runs one that merely monitors."""
    resources, scaler = reply.cluster_resource_state, reply.autoscaling_state
    status = _messages.NodeStatus.Name
    living = {node.node_id.hex(): node for node in resources.node_states if status(node.status) not in _GONE}
    started = {name: node.ray_node_type_name for name, node in living.items() if node.ray_node_type_name}
    managed = scaler.autoscaler_state_version > 0 and (bool(started) or types is not None)
    cluster = Cluster(
        nodes={name: dict(node.total_resources) for name, node in living.items()},
        started=started,
        autoscaled=managed,
        types=types if managed else None,
    )
    asked = sum(request.count for request in scaler.pending_instance_requests)
    gangs = (bundle for gang in resources.pending_gang_resource_requests for bundle in gang.requests)
    return ClusterView(
        cluster=cluster,
        free={name: dict(node.available_resources) for name, node in living.items()},
        arriving=asked + len(scaler.pending_instances),
        demand=tuple(dict(bundle.resources_bundle) for bundle in gangs),
    )


def _types() -> tuple[NodeType, ...] | None:
    """The node groups by which the cluster can grow; None unless they are configured."""
    config = ray_state.get_cluster_config()
    if config is None:
        return None
    return tuple(
        NodeType(group.name, dict(group.resources), group.max_count if group.max_count >= 0 else None)
        for group in config.node_group_configs
    )

"""What Ray's autoscaler asks for nodes: a provider for its monitor process, that passes everything on to the keeper.

Ray loads it by name (`provider: {type: external, module: elastic_cluster.local.autoscaled_provider.KeeperProvider}`),
so its methods are called as Ray's own providers' are: from several threads, each call by itself.
"""

from __future__ import annotations

import socket
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from elastic_cluster.json_lines import JsonLines
from elastic_cluster.local.autoscaled_cloud import HEAD_TYPE
from elastic_cluster.source import ClusterError

# A node that does not leave by itself is waited for by the keeper for as long as this.
_LIMIT_S = 30.0


class KeeperProvider(NodeProvider):
    """Names of nodes are the cluster's own; the head is there from the beginning and is never asked for."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._socket: str = provider_config["keeper_socket"]
        self._head: str = provider_config["head_name"]
        self._known: dict[str, dict[str, Any]] = {}

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        head = {"running": True, "tags": _head_tags(self._head)}
        # Replaced as a whole: other threads look things up in it meanwhile.
        self._known = {self._head: head, **self._ask("instances")}
        return [name for name in self._known if tag_filters.items() <= self.node_tags(name).items()]

    def is_running(self, node_id: str) -> bool:
        return bool(self._known.get(node_id, {}).get("running"))

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._known

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict(self._known[node_id]["tags"])

    def external_ip(self, node_id: str) -> str:
        return node_id

    def internal_ip(self, node_id: str) -> str:
        return node_id

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        raise ClusterError("tags are given when a node is asked for")

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        self._ask("launch", count=count, tags={**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE})

    def terminate_node(self, node_id: str) -> None:
        self._ask("terminate", name=node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config

    def _ask(self, command: str, **arguments: Any) -> Any:
        """A connection per call: the keeper answers in the order in which it is done."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket)
            lines = JsonLines(connection)
            lines.send({"id": 1, "do": command, **arguments})
            reply = lines.receive(_LIMIT_S, f"the keeper's answer to {command}")
        if "error" in reply:
            raise ClusterError(reply["error"])
        return reply["result"]


def _head_tags(name: str) -> dict[str, str]:
    return {
        TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
        TAG_RAY_USER_NODE_TYPE: HEAD_TYPE,
        TAG_RAY_NODE_NAME: name,
        TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
    }

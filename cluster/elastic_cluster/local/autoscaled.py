"""A local cluster whose nodes come and go by Ray's own autoscaler (v2): as many as are asked for, up to a number.

The autoscaler is the real one, in a process of its own on the head node. Only the cloud that it asks for machines is
played: by the keeper (`elastic_cluster.local.autoscaled_cloud`), whose nodes are real raylets, killed and cleared away
like those of any other local cluster. So a node is still lost by `kill_node`, and `add_node` makes one more available.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_cluster.local.autoscaled_cloud import HEAD_TYPE, WORKER_TYPE
from elastic_cluster.local.cluster import COMMAND_LIMIT_S, LocalCluster, object_store

_HEAD = "node-0"
_ENVIRONMENT = {
    "RAY_enable_autoscaler_v2": "1",
    # The autoscaler's interval, and how long it keeps a request for a machine that is no longer needed.
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_AUTOSCALER_PENDING_NODE_IDLE_TIMEOUT_S": "2",
    # Its figures for Prometheus: any free port, so that two clusters do not want the same one.
    "AUTOSCALER_METRIC_PORT": "0",
}


class AutoscaledCluster(LocalCluster):
    """A `LocalCluster` of one head without CPUs, to which Ray's autoscaler adds requested nodes.

    `add_node` returns at once: one more node is available from then on. `kill_node` also removes its machine from the
    available ones. Node names are never reused.
    """

    @classmethod
    def launch(
        cls,
        max_nodes: int = 4,
        *,
        at_hand: int | None = None,
        every_s: float | None = None,
        cpus_per_node: int = 2,
        gpus_per_node: int = 0,
        resources: Mapping[str, int] | None = None,
        labels: Mapping[str, str] | None = None,
        idle_timeout_s: float = 5.0,
        object_store_bytes: int = 100_000_000,
        environment: Mapping[str, str] | None = None,
        logs_to: str | Path | None = None,
        limit_s: float = 60.0,
    ) -> AutoscaledCluster:
        """The head, registered with Ray when this returns, and an autoscaler that may add `max_nodes` nodes.

        `at_hand` of them are available at once (None: all), one more every `every_s` seconds (None: only by
        `add_node`). A node that is idle for `idle_timeout_s` is released. Ray's autoscaler accepts
        whole numbers of resources only. Raises ClusterError when the head is not up after `limit_s` seconds.
        """
        if max_nodes < 1:
            raise ValueError(f"an autoscaled cluster may grow to at least one node, not {max_nodes}")
        first = max_nodes if at_hand is None else at_hand
        if not 0 <= first <= max_nodes:
            raise ValueError(f"of {max_nodes} nodes {first} cannot be at hand")
        store_bytes, store_directory = object_store(
            max_nodes + 1, object_store_bytes, shutil.disk_usage("/dev/shm").free
        )
        store = {"object_store_memory": store_bytes, "plasma_directory": store_directory}
        shape: dict[str, Any] = {
            "num_cpus": cpus_per_node,
            "num_gpus": gpus_per_node,
            "resources": {**(resources or {})},
        }
        identity = {"RAY_CLOUD_INSTANCE_ID": _HEAD, "RAY_NODE_TYPE_NAME": HEAD_TYPE}
        head = {
            "num_cpus": 0, "num_gpus": 0, "resources": {}, "labels": {}, "env_vars": identity, **store,
            "_system_config": {"prestart_worker_first_driver": False},
        }  # fmt: skip
        worker = {**shape, "labels": dict(labels or {}), **store}
        cloud = {"options": worker, "max_nodes": max_nodes, "at_hand": first, "every_s": every_s}
        cluster = cls._spawn({**_ENVIRONMENT, **(environment or {})})
        try:
            logs = None if logs_to is None else os.path.abspath(logs_to)
            cluster._ask(
                "start", limit_s + 5.0, "the head to start", nodes=[{"name": _HEAD, "options": head}], limit_s=limit_s,
                logs_to=logs, cloud=cloud, autoscaler=autoscaler_config(worker, max_nodes, idle_timeout_s),
            )  # fmt: skip
            cluster._hello()
        except BaseException:
            cluster.shutdown()
            raise
        return cluster

    def offer(self, count: int) -> None:
        """From now on this many nodes are available, including the present ones. None is removed."""
        self._ask("offer", COMMAND_LIMIT_S, f"{count} nodes to be offered", count=count)


def autoscaler_config(worker: Mapping[str, Any], max_nodes: int, idle_timeout_s: float) -> dict[str, Any]:
    """What Ray's autoscaler is configured with, but for where the keeper is. `worker` are the options of one node.

    Every list and mapping that Ray's schema knows has to be there: its code looks them up without asking.
    """
    wanted = {"CPU": worker["num_cpus"], "GPU": worker["num_gpus"], **worker["resources"]}
    offered = {name: count for name, count in wanted.items() if count}
    node: dict[str, Any] = {"node_config": {}, "min_workers": 0}
    nothing: list[str] = []
    return {
        "cluster_name": "elastic-local",
        "max_workers": max_nodes,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_timeout_s / 60.0,
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: {**node, "resources": {}, "max_workers": 0},
            WORKER_TYPE: {
                **node, "resources": offered, "labels": dict(worker["labels"]), "max_workers": max_nodes,
            },
        },
        "provider": {
            "type": "external",
            "module": "elastic_cluster.local.autoscaled_provider.KeeperProvider",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "head_name": _HEAD,
        },
        "auth": {}, "docker": {}, "file_mounts": {}, "metadata": {}, "cluster_synced_files": nothing,
        "rsync_exclude": nothing, "rsync_filter": nothing, "initialization_commands": nothing,
        "setup_commands": nothing, "head_setup_commands": nothing, "worker_setup_commands": nothing,
        "head_start_ray_commands": nothing, "worker_start_ray_commands": nothing,
    }  # fmt: skip

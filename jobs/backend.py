"""What the command line needs from the packages that start things. Imported late: `elastic story` needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.chaos import Breakable
from elastic.core.errors import UsageError
from elastic.core.settings import RunSettings
from elastic.observe.text import plural
from jobs.handle import RunHandle


class ClusterLike(Breakable, Protocol):
    """What is used of `cluster.LocalCluster`."""

    @property
    def address(self) -> str: ...

    @property
    def socket_path(self) -> Path: ...

    def detach(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class NodeShape:
    """One node of a local cluster: room for exactly one slot, so that losing it loses one slot."""

    cpus: float
    gpus: float
    resources: Mapping[str, float]


class Backend(Protocol):
    """1. `start_cluster` for a local run, or `attach_cluster` to take one over; 2. `start_run` or `attach_run`."""

    def start_cluster(self, nodes: int, shape: NodeShape, python_path: str) -> ClusterLike: ...

    def attach_cluster(self, socket_path: str) -> ClusterLike: ...

    def start_run(
        self, settings: RunSettings, entry_point: str, config: Mapping[str, Any], address: str, folder: str
    ) -> RunHandle: ...

    def attach_run(self, run_id: str, address: str) -> RunHandle:
        """Raises RunNotFound when no controller of that run answers at the address."""
        ...

    def disconnect(self) -> None:
        """Before the cluster is shut down: Ray waits for a cluster that is gone, even at the exit of the process."""
        ...


def node_shape(settings: RunSettings) -> NodeShape:
    wanted = {name: count * settings.scaling.workers_per_slot for name, count in settings.resources_per_worker.items()}
    return NodeShape(wanted.pop("CPU", 1.0), wanted.pop("GPU", 0.0), wanted)


def check_nodes(nodes: int, settings: RunSettings) -> None:
    scaling = settings.scaling
    if nodes < scaling.min_slots:
        raise UsageError(
            f"{plural(nodes, 'node')} can hold {plural(nodes * scaling.workers_per_slot, 'worker')}, "
            f"but min_workers is {scaling.min_workers}"
        )

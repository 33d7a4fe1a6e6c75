"""The interface of the front ends to the packages that start clusters and runs, so that `elastic story` does not import
Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastic_cluster.chaos import Breakable

from elastic.core.errors import ElasticError, UsageError
from elastic.core.settings import RunSettings
from elastic.core.wording import plural
from elastic_jobs.running.handle import RunHandle
from elastic_jobs.running.run_plan import Job, Place
from elastic_jobs.submit.jobs_api import JobsApi


class NotStarted(ElasticError):
    """The cluster did not start, so neither did the run."""


class ClusterLike(Breakable, Protocol):
    """The used part of `elastic_cluster.LocalCluster`."""

    @property
    def address(self) -> str: ...

    @property
    def socket_path(self) -> Path: ...

    def detach(self) -> None: ...

    def shutdown(self) -> None: ...


class SupervisorLike(Protocol):
    """The supervisor of a submitted run, inside its cluster: it replaces lost drivers."""

    def ensure(self) -> None:
        """Start the supervisor if there is none, and tell it about this attempt. Does not wait; call it repeatedly,
        because the supervisor of an earlier attempt may be ending."""
        ...


@dataclass(frozen=True)
class NodeShape:
    """One node of a local cluster: room for exactly one slot, so that a lost node is one lost slot."""

    cpus: float
    gpus: float
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Growth:
    """A local cluster under Ray's autoscaler: `at_hand` nodes are available at once, one more every `every_s` seconds
    (None: only by faults), up to `max_nodes`."""

    max_nodes: int
    at_hand: int
    every_s: float | None


class Backend(Protocol):
    """1. `start_cluster` or `start_autoscaled` for a local run, or `attach_cluster` to take one over;
    2. `start_run` or `attach_run`."""

    def start_cluster(self, nodes: int, shape: NodeShape, python_path: str, durable: bool = False) -> ClusterLike:
        """`durable`: Ray's control store can be killed and restarted. Raises NotStarted."""
        ...

    def start_autoscaled(self, growth: Growth, shape: NodeShape, python_path: str) -> ClusterLike: ...

    def attach_cluster(self, socket_path: str) -> ClusterLike: ...

    def start_run(self, job: Job, address: str) -> RunHandle: ...

    def attach_run(self, run_id: str, address: str) -> RunHandle:
        """Raises RunNotFound if no controller of that run answers at the address."""
        ...

    def jobs_api(self, address: str) -> JobsApi:
        """The Ray Jobs server at an http(s) address. Raises Unreachable and Denied."""
        ...

    def supervisor(self, run_id: str, attempt: int) -> SupervisorLike:
        """For the driver of a Jobs API attempt, after it has joined its cluster."""
        ...

    def disconnect(self) -> None:
        """Call before the cluster is shut down: Ray waits for a lost cluster, even at the exit of the process."""
        ...


def node_shape(settings: RunSettings) -> NodeShape:
    wanted = {name: count * settings.scaling.workers_per_slot for name, count in settings.resources_per_worker.items()}
    return NodeShape(wanted.pop("CPU", 1.0), wanted.pop("GPU", 0.0), wanted)


def growth(settings: RunSettings, place: Place) -> Growth:
    """How the local cluster of an autoscaled run grows. Raises UsageError for contradictory limits."""
    scaling, wanted = settings.scaling, node_shape(settings)
    most = place.max_nodes or scaling.max_slots
    first = scaling.min_slots if place.nodes is None else place.nodes
    if first > most:
        raise UsageError(f"--nodes {first} is above --max-nodes {most}")
    check_nodes(most, settings)
    for name, count in {"CPU": wanted.cpus, "GPU": wanted.gpus, **wanted.resources}.items():
        if count != int(count):
            raise UsageError(f"--autoscale: Ray's autoscaler takes whole numbers, but a slot needs {name}: {count:g}")
    return Growth(most, first, place.node_every_s or None)


def check_nodes(nodes: int, settings: RunSettings) -> None:
    """Raises UsageError for fewer nodes than `min_workers` need."""
    scaling = settings.scaling
    if nodes < scaling.min_slots:
        raise UsageError(
            f"{plural(nodes, 'node')} can hold {plural(nodes * scaling.workers_per_slot, 'worker')}, "
            f"but min_workers is {scaling.min_workers}"
        )

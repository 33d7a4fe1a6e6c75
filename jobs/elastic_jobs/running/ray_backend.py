"""The backend on Ray: `elastic_cluster` for local nodes, `elastic.runtime` for runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from elastic_cluster.source import ClusterError

from elastic.core.errors import ElasticError
from elastic_jobs.running.backend import ClusterLike, Growth, NodeShape, NotStarted, SupervisorLike
from elastic_jobs.running.handle import RunHandle
from elastic_jobs.running.run_plan import Job
from elastic_jobs.submit.jobs_api import JobsApi

logger = logging.getLogger(__name__)


class RayBackend:
    """Imports Ray only in the calls that need it."""

    def start_cluster(self, nodes: int, shape: NodeShape, python_path: str, durable: bool = False) -> ClusterLike:
        from elastic_cluster.local.cluster import LocalCluster

        try:
            return LocalCluster.start(
                nodes,
                cpus_per_node=shape.cpus,
                gpus_per_node=shape.gpus,
                resources=shape.resources,
                durable_control_store=durable,
                environment=_paths(python_path),
            )
        except ClusterError as error:
            raise NotStarted(f"the local cluster did not start: {error}") from error

    def start_autoscaled(self, growth: Growth, shape: NodeShape, python_path: str) -> ClusterLike:
        from elastic_cluster.local.autoscaled import AutoscaledCluster

        try:
            return AutoscaledCluster.launch(
                growth.max_nodes,
                at_hand=growth.at_hand,
                every_s=growth.every_s,
                cpus_per_node=int(shape.cpus),
                gpus_per_node=int(shape.gpus),
                resources={name: int(count) for name, count in shape.resources.items()},
                environment=_paths(python_path),
            )
        except ClusterError as error:
            raise NotStarted(f"the local cluster did not start: {error}") from error

    def attach_cluster(self, socket_path: str) -> ClusterLike:
        from elastic_cluster.local.cluster import LocalCluster

        try:
            return LocalCluster.attach(socket_path)
        except ClusterError as error:
            raise ElasticError(str(error)) from error

    def start_run(self, job: Job, address: str) -> RunHandle:
        from elastic.runtime.driver import client
        from elastic.runtime.train_function import Entry

        _hush_ray()
        client.connect(address)
        handle: RunHandle = client.start(job.settings, Entry.named(job.entry_point, job.config, job.folder))
        return handle

    def attach_run(self, run_id: str, address: str) -> RunHandle:
        from elastic.runtime.driver.client import attach

        _hush_ray()
        handle: RunHandle = attach(run_id, address)
        return handle

    def jobs_api(self, address: str) -> JobsApi:
        from elastic_jobs.submit.ray_jobs_api import RayJobsApi

        return RayJobsApi(address)

    def supervisor(self, run_id: str, attempt: int) -> SupervisorLike:
        from elastic_jobs.submit.supervisor_actor import RaySupervisor

        return RaySupervisor(run_id, attempt)

    def disconnect(self) -> None:
        self.leave()

    def leave(self) -> bool:
        """False if Ray does not leave a cluster that is lost: the process must then exit without Ray's own shutdown."""
        if "ray" not in sys.modules:
            return True
        from elastic.runtime.driver.connection import disconnect

        return disconnect()


def _paths(python_path: str) -> dict[str, str]:
    paths = [python_path, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _hush_ray() -> None:
    """Send raylet messages to the log. Ray prints them to the driver's stdout, in colour, whatever `log_to_driver`
    says, and stdout is for data."""
    from ray._private import worker

    def log(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        for line in data.get("lines", ()):
            logger.info("ray: %s", line)

    worker.print_to_stdstream = log

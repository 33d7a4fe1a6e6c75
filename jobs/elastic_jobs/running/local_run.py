"""A run on a local cluster that this process started or took over: from the cluster's start to its end.

On Ctrl-C a background process (`elastic_jobs.running.background`) takes the cluster over and the run continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_cluster.source import ClusterError

from elastic.core.wording import plural
from elastic_jobs.display import Display
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running import handover
from elastic_jobs.running.backend import Backend, ClusterLike, NotStarted, growth, node_shape
from elastic_jobs.running.fault_injection import Faults
from elastic_jobs.running.follow import watch
from elastic_jobs.running.handle import RunHandle
from elastic_jobs.running.live import Live, write_live
from elastic_jobs.running.run_plan import RunPlan
from elastic_jobs.terminal import say


def run_locally(backend: Backend, plan: RunPlan, folder: RunFolder) -> int:
    """Start a local cluster and the run on it, and follow the run to its end; returns the exit code."""
    try:
        cluster = _start_cluster(backend, plan)
    except KeyboardInterrupt as error:
        raise NotStarted("interrupted before anything was started") from error
    handed_over = False
    try:
        write_live(folder, Live(cluster.address, str(cluster.socket_path)))
        handle = backend.start_run(plan.job, cluster.address)
        code, handed_over = own(plan, cluster, handle, folder)
        return code
    finally:
        if handed_over:
            cluster.detach()
        else:
            end(backend, cluster)


def _start_cluster(backend: Backend, plan: RunPlan) -> ClusterLike:
    job, place = plan.job, plan.place
    shape = node_shape(job.settings)
    if not place.autoscale:
        nodes = place.nodes or job.settings.scaling.max_slots
        say(f"starting a local cluster of {plural(nodes, 'node')}")
        return backend.start_cluster(nodes, shape, job.folder, durable=place.faults.strikes_control_store)
    grown = growth(job.settings, place)
    more = f", one more every {grown.every_s:g} s" if grown.every_s else ""
    say(
        f"starting a local cluster with Ray's autoscaler: {plural(grown.at_hand, 'node')} available now{more}, "
        f"{grown.max_nodes} at most"
    )
    return backend.start_autoscaled(grown, shape, job.folder)


def own(plan: RunPlan, cluster: ClusterLike, handle: RunHandle, folder: RunFolder) -> tuple[int, bool]:
    """Follow a run whose cluster this process owns; (exit code, whether another process owns the cluster now)."""
    company = _Owner(plan, cluster, handle, folder)
    code = watch(handle, folder, plan.output, company)
    return code, company.handed_over


class _Owner:
    """Implements `elastic_jobs.running.follow.Company`: faults are injected meanwhile, and the cluster needs a new
    owner."""

    def __init__(self, plan: RunPlan, cluster: ClusterLike, handle: RunHandle, folder: RunFolder) -> None:
        self._plan = plan
        self._cluster = cluster
        self._folder = folder
        self._faults = Faults(plan.place.faults, cluster, handle)
        self.handed_over = False

    def start(self, display: Display) -> None:
        self._faults.start(display)

    def leave(self) -> bool:
        rest = self._plan.with_faults(self._faults.stop())
        say("detaching; a background process takes over the local cluster ...")
        cluster = self._cluster
        failure = handover.hand_over(rest, str(cluster.socket_path), cluster.address, self._folder)
        if failure is not None:
            say(f"the hand-over failed ({failure}); following the run again, Ctrl-C retries")
        self.handed_over = failure is None
        return self.handed_over

    def end(self) -> Sequence[Mapping[str, Any]]:
        self._faults.stop()
        return self._faults.injected


def end(backend: Backend, cluster: ClusterLike) -> None:
    """Leave the cluster and shut it down."""
    backend.disconnect()
    try:
        cluster.shutdown()
    except ClusterError as error:
        # The exit code is that of the run. The keeper continues to end the cluster without this process.
        say(f"the local cluster has not ended yet: {error}")

"""One run from its start to its end: on a local cluster made for it, or on a cluster that is there.

On Ctrl-C the watcher leaves and the run goes on: on a cluster elsewhere by itself, on a local one with a background
process (`elastic_jobs.background`) that owns the cluster from then on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elastic_cluster.source import ClusterError

from elastic.core.errors import StorageError
from elastic.core.settings import RunSettings
from elastic.observe.text import plural
from elastic_jobs import background
from elastic_jobs.backend import Backend, ClusterLike, NotStarted, growth, node_shape
from elastic_jobs.display import open_display
from elastic_jobs.exit_codes import NOT_FINISHED
from elastic_jobs.fault_injection import FaultThread, parse_faults
from elastic_jobs.follow import conclude, follow
from elastic_jobs.handle import RunHandle
from elastic_jobs.live import Live, remove_live, write_live
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.terminal import say


@dataclass(frozen=True)
class Launch:
    """What to run and where: on `address`, or on a local cluster of `nodes` nodes. Has an exact JSON form.

    With `autoscale` the local cluster grows to `max_nodes`; see `elastic_jobs.backend.growth`.
    """

    settings: Mapping[str, Any]
    entry_point: str
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "."
    nodes: int | None = None
    address: str | None = None
    chaos: str | None = None
    summary_file: str | None = None
    as_json: bool = False
    autoscale: bool = False
    max_nodes: int | None = None
    node_every_s: float | None = None

    @property
    def run_settings(self) -> RunSettings:
        return RunSettings.from_json(self.settings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def launch(backend: Backend, plan: Launch) -> int:
    """Starts the run and follows it; returns the exit code."""
    settings = plan.run_settings
    folder = RunFolder(settings.storage_url, settings.run_id)
    say(f"run {settings.run_id}, kept in {settings.storage_url}")
    if plan.address is None:
        return _launch_locally(backend, plan, folder)
    # First the hint, then the run: whoever is killed in between leaves no run that nobody would find.
    write_live(folder, Live(plan.address))
    handle = backend.start_run(settings, plan.entry_point, plan.config, plan.address, plan.folder)
    return watch(handle, folder, plan.summary_file, plan.as_json)


def watch(handle: RunHandle, folder: RunFolder, summary_file: str | None, as_json: bool) -> int:
    """Follows a run that does not depend on this process."""
    display = open_display(sys.stderr)
    try:
        result = follow(handle, display)
    except KeyboardInterrupt:
        display.close()
        say(f"detached; {how_to_come_back(folder)}")
        return NOT_FINISHED
    finally:
        display.close()
    forget_live(folder)
    return conclude(folder.run_id, folder.url, result, summary_file, as_json)


def _launch_locally(backend: Backend, plan: Launch, folder: RunFolder) -> int:
    try:
        settings, cluster = plan.run_settings, _start_cluster(backend, plan)
    except KeyboardInterrupt as error:
        raise NotStarted("interrupted before anything was started") from error
    handed_over = False
    try:
        write_live(folder, Live(cluster.address, str(cluster.socket_path)))
        handle = backend.start_run(settings, plan.entry_point, plan.config, cluster.address, plan.folder)
        code, handed_over = own(plan, cluster, handle, folder)
        return code
    finally:
        if handed_over:
            cluster.detach()
        else:
            end(backend, cluster)


def _start_cluster(backend: Backend, plan: Launch) -> ClusterLike:
    settings = plan.run_settings
    if not plan.autoscale:
        nodes = plan.nodes or settings.scaling.max_slots
        say(f"starting a local cluster of {plural(nodes, 'node')}")
        durable = parse_faults(plan.chaos).strikes_control_store
        return backend.start_cluster(nodes, node_shape(settings), plan.folder, durable)
    grown = growth(settings, plan.max_nodes, plan.nodes, plan.node_every_s)
    more = f", one more every {grown.every_s:g} s" if grown.every_s else ""
    say(
        f"starting a local cluster with Ray's autoscaler: {plural(grown.at_hand, 'node')} can be had now{more}, "
        f"{grown.max_nodes} at most"
    )
    return backend.start_autoscaled(grown, node_shape(settings), plan.folder)


def own(plan: Launch, cluster: ClusterLike, handle: RunHandle, folder: RunFolder) -> tuple[int, bool]:
    """Follows a run whose cluster this process owns; (exit code, whether another process owns the cluster now)."""
    display = open_display(sys.stderr)
    faults = FaultThread(parse_faults(plan.chaos), cluster, handle, display)
    faults.start()
    try:
        while True:
            try:
                result = follow(handle, display)
                break
            except KeyboardInterrupt:
                with _uninterrupted():
                    display.close()
                    rest = replace(plan, chaos=str(faults.stop()) or None)
                    if _hand_over(rest, cluster, folder):
                        return NOT_FINISHED, True
                display = open_display(sys.stderr)
                injected, faults = faults.injected, FaultThread(parse_faults(rest.chaos), cluster, handle, display)
                faults.injected = injected
                faults.start()
    finally:
        display.close()
    faults.stop()
    forget_live(folder)
    code = conclude(folder.run_id, folder.url, result, plan.summary_file, plan.as_json, faults.injected)
    return code, False


def _hand_over(plan: Launch, cluster: ClusterLike, folder: RunFolder) -> bool:
    say("detaching; a background process takes the local cluster over ...")
    failure = background.take_over(plan.to_json(), str(cluster.socket_path), cluster.address, folder)
    if failure is not None:
        say(f"that did not work, so the run is followed on ({failure}); Ctrl-C again tries again")
        return False
    say(f"detached; {how_to_come_back(folder)}")
    return True


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An impatient second Ctrl-C must not end the run that the first one is handing over."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end(backend: Backend, cluster: ClusterLike) -> None:
    backend.disconnect()
    try:
        cluster.shutdown()
    except ClusterError as error:
        # What the run came to is what counts. The keeper goes on ending the cluster without this process.
        say(f"the local cluster has not ended yet: {error}")


def how_to_come_back(folder: RunFolder) -> str:
    return (
        f"run {folder.run_id} goes on. Come back with:  elastic watch {folder.run_id} --storage {folder.url}  "
        f"or end it with:  elastic stop {folder.run_id} --storage {folder.url}"
    )


def forget_live(folder: RunFolder) -> None:
    try:
        remove_live(folder)
    except StorageError as error:
        say(str(error))

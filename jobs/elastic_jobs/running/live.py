"""Where a run can be reached while it runs: `live.json` next to its journal. Only a hint: the run itself decides."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic.core.errors import ElasticError, NobodyAnswers, RunNotFound, StorageError, UsageError
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic_jobs.exit_codes import STATUSES
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.handle import RunHandle
from elastic_jobs.terminal import say
from elastic_jobs.trust import check_address

_FILE = "live.json"
# A head node that is being replaced returns within a few minutes.
_HEAD_AWAY_S = 300.0
_PAUSE_S = 1.0
_PROBE_LIMIT_S = 2.0


class OutOfReach(RunNotFound):
    """The run may still be running, but it cannot be reached."""


@dataclass(frozen=True)
class Live:
    """`cluster_socket` is set when a local cluster was started for the run."""

    address: str
    cluster_socket: str | None = None


def write_live(folder: RunFolder, live: Live) -> None:
    folder.write(_FILE, asdict(live))


def read_live(folder: RunFolder) -> Live | None:
    data: Mapping[str, Any] | None = folder.read(_FILE)
    if not data or not isinstance(data.get("address"), str):
        return None
    return Live(data["address"], data.get("cluster_socket"))


def remove_live(folder: RunFolder) -> None:
    folder.remove(_FILE)


def forget_live(folder: RunFolder) -> None:
    """As `remove_live`, for a run that has ended: a failure of storage is only reported."""
    try:
        remove_live(folder)
    except StorageError as error:
        say(str(error))


def how_to_come_back(folder: RunFolder, address: str | None) -> str:
    where = f"{folder.run_id} --storage {folder.url}{f' --address {address}' if address else ''}"
    return f"run {folder.run_id} continues. Follow it again:  elastic watch {where}  or end it:  elastic stop {where}"


def reach(backend: Backend, folder: RunFolder, address: str | None, trusted: bool = False) -> RunHandle:
    """The handle of a running run. Raises RunNotFound if it does not run at any known address, and
    UsageError for an address from storage that is not trusted (`elastic_jobs.trust`)."""
    live = read_live(folder)
    where = address or (live.address if live else None)
    if where is None:
        raise RunNotFound(f"run {folder.run_id!r} is not running; continue it with `elastic resume`")
    if address is None and live is not None and live.cluster_socket is not None and not _answers(live.cluster_socket):
        # A local cluster does not outlive its keeper, so waiting for its head would be useless.
        raise RunNotFound(
            f"run {folder.run_id!r} is not running: its local cluster is gone; continue it with `elastic resume`"
        )
    if address is None and live is not None:
        check_address(folder.run_id, live.address, live.cluster_socket, trusted or folder.signed)
    try:
        return backend.attach_run(folder.run_id, where)
    except RunNotFound:
        raise
    except (ElasticError, ConnectionError) as error:
        raise OutOfReach(f"run {folder.run_id!r} cannot be reached at {where}: {error}") from error


def reach_patiently(backend: Backend, folder: RunFolder, address: str | None, trusted: bool = False) -> RunHandle:
    """As `reach`, but waits for the head of a run that has not ended, as long as a restart of a head usually takes."""
    deadline, told = time.monotonic() + _HEAD_AWAY_S, False
    while True:
        try:
            return reach(backend, folder, address, trusted)
        except OutOfReach as error:
            refused = isinstance(error.__cause__, UsageError) and not isinstance(error.__cause__, NobodyAnswers)
            if refused or time.monotonic() > deadline or (not told and _ended(folder)):
                raise
            if not told:
                say(f"{error}; its head may be restarting; retrying")
            told = True
            time.sleep(_PAUSE_S)


def _ended(folder: RunFolder) -> bool:
    try:
        return summarize(JournalReader(folder.url, folder.run_id).records()).get("status") in STATUSES
    except ElasticError:
        return False


def _answers(cluster_socket: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_LIMIT_S)
        return probe.connect_ex(cluster_socket) == 0

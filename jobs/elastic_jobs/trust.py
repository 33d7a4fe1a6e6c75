"""Trust in storage: a writer of storage must not be able to run code on the operator's machine.

`job.json` names code, and `live.json` names a cluster: connecting there sends this machine's Ray token and reads what
the cluster answers with pickle. So both count only if the operator's own folder or environment names the same, if they
are signed with the operator's key (`elastic_jobs.signing`), confirmed, or with `--trust-storage`.
"""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from elastic.core.errors import UsageError
from elastic.entrypoint import parse_entry_point
from elastic.store.address import local_root
from elastic_jobs.running.run_plan import Job
from elastic_jobs.terminal import confirmed

# Ray's own variable for the cluster that its drivers join.
_CLUSTER = "RAY_ADDRESS"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-storage", action="store_true",
        help="trust the run's folder in storage: the address of its cluster, and the code that it names",
    )  # fmt: skip


def check_address(run_id: str, address: str, cluster_socket: str | None, trusted: bool) -> None:
    """Raises UsageError for an address from storage that nothing on this machine names, unless it is confirmed."""
    host = address.rpartition(":")[0].lower()
    local = cluster_socket is not None and host in _LOOPBACK and _is_own_socket(cluster_socket)
    if trusted or local or address == os.environ.get(_CLUSTER):
        return
    what = (
        f"storage says that run {run_id!r} is in the Ray cluster at {address}, which would get this machine's Ray token"
    )
    if not confirmed(f"{what}. Connect to it?"):
        raise UsageError(
            f"{what}; if it is yours, name it with --address {address} or {_CLUSTER}, or use --trust-storage"
        )


def check_code(job: Job, trusted: bool) -> None:
    """Raises UsageError for code that is named in storage and is not in the working directory, unless it is confirmed.

    Code in the storage itself never counts as the operator's own.
    """
    if trusted or _is_own_code(job):
        return
    what = f"storage says that the run's training function is {job.entry_point}, in {job.folder}"
    if not confirmed(f"{what}, which is not in {Path.cwd()}. Import and run it?"):
        raise UsageError(
            f"{what}, which is not in {Path.cwd()}: resume in the job's own folder, name the job file with --job, or "
            "use --trust-storage"
        )


def _is_own_code(job: Job) -> bool:
    entry = parse_entry_point(job.entry_point, job.folder)
    base = Path(entry.target) if entry.is_file else Path(entry.folder) / entry.target.replace(".", "/")
    tried = [base] if entry.is_file else [base.with_name(f"{base.name}.py"), base / "__init__.py"]
    file = next((path for path in tried if path.is_file()), None)
    if file is None:
        return False
    # A link in the working directory is the operator's own, a link in the storage is not.
    paths = (Path(os.path.abspath(file)), file.resolve())
    roots = [local_root(url) for url in (job.settings.storage_url, job.settings.checkpoint.url)]
    stored = [found for root in roots if root is not None for found in (Path(root), Path(root).resolve())]
    return any(path.is_relative_to(Path.cwd()) for path in paths) and not any(
        path.is_relative_to(root) for path in paths for root in stored
    )


def _is_own_socket(path: str) -> bool:
    try:
        about = os.stat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(about.st_mode) and about.st_uid == os.getuid()

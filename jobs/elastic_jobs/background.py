"""The process that goes on with a local run when its watcher has left: `python -m elastic_jobs.background`, the plan
on stdin.

It owns the cluster beside the watcher as soon as it has said "ready", so that there is no instant without an owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from elastic.core.errors import ElasticError
from elastic_jobs.run_folder import RunFolder

_READY = "ready"


def take_over(plan: Mapping[str, Any], cluster_socket: str, address: str, folder: RunFolder) -> str | None:
    """Starts the process and waits until it owns the cluster. None, or why it could not."""
    request = json.dumps({"plan": plan, "cluster_socket": cluster_socket, "address": address})
    log_file = folder.local_path("background.log") or f"{tempfile.gettempdir()}/elastic-{folder.run_id}.log"
    try:
        with open(log_file, "ab") as log:
            # A session of its own: the next Ctrl-C of the terminal, or its end, is not meant for this process.
            child = subprocess.Popen(
                [sys.executable, "-m", "elastic_jobs.background"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
    except OSError as error:
        return f"no background process can be started: {error}"
    assert child.stdin is not None
    assert child.stdout is not None
    # One that has ended at once reads nothing, and has no answer either.
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(request)
    answer = child.stdout.readline().strip()
    if answer == _READY:
        return None
    child.stdout.close()
    child.wait()
    return answer or f"the background process ended at once; see {log_file}"


def main() -> int:
    # Not at the top: launch imports this module.
    from elastic_jobs.launch import Launch, end, own
    from elastic_jobs.ray_backend import RealBackend

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.loads(sys.stdin.read())
    plan, backend = Launch(**request["plan"]), RealBackend()
    settings = plan.run_settings
    folder = RunFolder(settings.storage_url, settings.run_id)
    try:
        cluster = backend.attach_cluster(request["cluster_socket"])
        handle = backend.attach_run(settings.run_id, request["address"])
    except ElasticError as error:
        # The watcher is still there and keeps the cluster; it must not be shut down from here.
        _answer(str(error))
        return error.exit_code
    try:
        _answer(_READY)
        return own(plan, cluster, handle, folder)[0]
    finally:
        end(backend, cluster)


def _answer(text: str) -> None:
    """Once: the watcher leaves after it, and what is printed from then on goes to the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

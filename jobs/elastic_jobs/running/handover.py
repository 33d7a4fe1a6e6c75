"""Handing a local run over to a background process, so that its follower can leave."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile

from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.run_plan import RunPlan

READY = "ready"


def hand_over(plan: RunPlan, cluster_socket: str, address: str, folder: RunFolder) -> str | None:
    """Start `elastic_jobs.running.background` and wait until it owns the cluster as well. None, or why it does not."""
    request = json.dumps({"plan": plan.to_json(), "cluster_socket": cluster_socket, "address": address})
    log_file = folder.local_path("background.log") or f"{tempfile.gettempdir()}/elastic-{folder.run_id}.log"
    try:
        with open(log_file, "ab") as log:
            # A session of its own: the next Ctrl-C and the end of the terminal must not reach this process.
            child = subprocess.Popen(
                [sys.executable, "-m", "elastic_jobs.running.background"],
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
    # A process that has ended at once reads nothing and gives no answer.
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(request)
    answer = child.stdout.readline().strip()
    if answer == READY:
        return None
    child.stdout.close()
    child.wait()
    return answer or f"the background process ended at once; see {log_file}"

"""The process that keeps a local run when its follower has left: `python -m elastic_jobs.running.background`, the plan
on stdin.

From "ready" on it owns the cluster together with the follower, so that the cluster is never without an owner.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from elastic.core.errors import ElasticError
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.handover import READY
from elastic_jobs.running.local_run import end, own
from elastic_jobs.running.ray_backend import RayBackend
from elastic_jobs.running.run_plan import RunPlan


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.loads(sys.stdin.read())
    plan, backend = RunPlan.from_json(request["plan"]), RayBackend()
    settings = plan.job.settings
    folder = RunFolder(settings.storage_url, settings.run_id)
    try:
        cluster = backend.attach_cluster(request["cluster_socket"])
        handle = backend.attach_run(settings.run_id, request["address"])
    except ElasticError as error:
        # The follower still owns the cluster, so this process must not shut it down.
        _answer(str(error))
        return error.exit_code
    try:
        _answer(READY)
        return own(plan, cluster, handle, folder)[0]
    finally:
        end(backend, cluster)


def _answer(text: str) -> None:
    """Once: the follower leaves after it, and later output goes to the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

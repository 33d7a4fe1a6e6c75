"""Starting a run where its plan says, and following it to its end."""

from __future__ import annotations

from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import watch
from elastic_jobs.running.live import Live, write_live
from elastic_jobs.running.local_run import run_locally
from elastic_jobs.running.run_plan import RunPlan
from elastic_jobs.terminal import say


def launch(backend: Backend, plan: RunPlan, folder: RunFolder) -> int:
    """Start the run and follow it; returns the exit code."""
    say(f"run {folder.run_id}, stored in {folder.url}")
    if unlike := plan.job.settings.mesh.unlike:
        say(f"run {folder.run_id}: {unlike}")
    address = plan.place.address
    if address is None:
        return run_locally(backend, plan, folder)
    # live.json before the run: a launcher that is killed in between must not leave a run that cannot be found.
    write_live(folder, Live(address))
    return watch(backend.start_run(plan.job, address), folder, plan.output, address=address)

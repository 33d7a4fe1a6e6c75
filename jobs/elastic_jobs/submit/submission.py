"""A submission from the job file to the Jobs API: all checks are made before anything is sent."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from elastic.core.errors import NoCapacity, UsageError
from elastic.core.policy.capacity import Cluster, Need, Supply, judge
from elastic.core.wording import plural
from elastic.observe.text import size
from elastic_jobs.job_file.checks import check, refuse
from elastic_jobs.job_file.load import load_job
from elastic_jobs.job_file.spec import JobSpec
from elastic_jobs.job_file.submit_section import Variables, environment, runtime_env
from elastic_jobs.run_folder import ENVIRONMENT
from elastic_jobs.running.run_plan import Job
from elastic_jobs.submit import attempts
from elastic_jobs.submit.driver_command import DriverCommand, Mode
from elastic_jobs.submit.jobs_api import AlreadySubmitted, ClusterFacts, DriverNeeds, JobsApi, Submission, Unreachable
from elastic_jobs.submit.package import Package, check_entry_point, check_package, list_package, write_archive
from elastic_jobs.submit.supervision import NEEDS_KEY
from elastic_jobs.terminal import say


@dataclass(frozen=True)
class Draft:
    """A job, checked as far as this machine can. `file` is the job file's path in the package."""

    spec: JobSpec
    job: Job
    file: str
    package: Package
    variables: Variables

    @property
    def storage(self) -> str:
        return self.job.settings.storage_url

    @property
    def needs(self) -> DriverNeeds:
        wanted = self.spec.submit
        return DriverNeeds(wanted.cpus, wanted.memory_mb * 10**6, wanted.resources, wanted.labels)


def prepare(file: str, run_id: str | None, storage: str | None, env: list[str]) -> Draft:
    """The job, checked before anything is sent. Raises UsageError."""
    path = Path(file).absolute()
    spec = load_job(path, storage_url=storage)
    check_storage_is_named(spec)
    job = spec.job(path, run_id)
    refuse(check(job))
    root = Path(os.path.normpath(path.parent / Path(spec.submit.working_dir or ".").expanduser()))
    package = list_package(root, spec.submit.exclude)
    check_package(package, spec.submit.package_limit_mb * 10**6)
    inside = os.path.relpath(path, root)
    if inside not in package:
        raise UsageError(f"the job file {path} is not in the package of {root}; check working_dir and .gitignore")
    check_entry_point(package, os.path.dirname(inside) or ".", spec.entry_point)
    for url in dict.fromkeys((job.settings.storage_url, job.settings.checkpoint.url)):
        check_storage_url(url, root)
    return Draft(spec, job, inside, package, environment(spec.submit.env_vars, env))


def check_storage_is_named(spec: JobSpec) -> None:
    """Raises UsageError if no storage is named: the default, ./runs, would be another folder on every node."""
    if not (spec.storage_url or spec.checkpoint.url or os.environ.get(ENVIRONMENT)):
        raise UsageError(
            "name the run's storage, which every node of the cluster must reach: storage_url in the job file, "
            f"--storage, or ${ENVIRONMENT}"
        )


def check_storage_url(url: str, root: Path) -> None:
    """Raises UsageError for storage inside the package."""
    if "://" not in url and "::" not in url and Path(url).is_relative_to(root):
        raise UsageError(
            f"storage {url} is inside the package, which the cluster unpacks into a temporary folder; name a "
            "URL, or a folder that every node can reach"
        )


def check_cluster(facts: ClusterFacts, draft: Draft) -> None:
    """Raises UsageError for another release of Ray, and NoCapacity for resources that no node of a fixed cluster has.

    Ray would let such a driver wait for 15 minutes. The run itself judges later what an autoscaler can add.
    """
    here = metadata.version("ray")
    if _minor(facts.ray_version) != _minor(here):
        raise UsageError(
            f"the cluster runs Ray {facts.ray_version}, and this is Ray {here}: install ray=={facts.ray_version} here, "
            "or the other way round"
        )
    if facts.autoscaling:
        return
    nodes = Cluster({str(number): node for number, node in enumerate(facts.nodes)})
    needs, settings = draft.needs, draft.job.settings
    scaling = settings.scaling
    driver = Need({"CPU": needs.cpus, "memory": needs.memory_bytes, **needs.resources})
    workers = Need(settings.resources_per_worker, scaling.workers_per_slot, scaling.min_slots)
    for need, who in ((driver, "the driver"), (workers, workers.who)):
        judgement = judge(need, nodes)
        if judgement.supply is Supply.NEVER:
            raise NoCapacity(judgement.sentence.replace(need.who, who, 1))


def send(api: JobsApi, draft: Draft, attempt: int, mode: Mode, address: str, max_steps: int | None = None) -> None:
    """Packs and submits. Raises UsageError if another client has submitted this attempt in the meantime."""
    spec, version, run_id = draft.spec, metadata.version("ray-elastic"), draft.job.settings.run_id
    command = DriverCommand(draft.file, run_id, attempt, mode, draft.storage, version, max_steps)
    about = {**attempts.metadata(run_id, attempt, draft.storage, version), NEEDS_KEY: draft.needs.to_text()}
    if draft.variables.taken:
        about[attempts.TAKEN_KEY] = ",".join(draft.variables.taken)
    grace_s = spec.submit.grace_s(spec.failures)
    say(f"sending {plural(len(draft.package.files), 'file')}, {size(draft.package.bytes)}, of {draft.package.root}")
    if draft.package.left_out:
        names = ", ".join(draft.package.left_out[:5])
        say(f"not sent (special files, links to folders, links out of the folder): {names}")
    with tempfile.TemporaryDirectory(prefix="elastic-submit-") as folder:
        archive = Path(folder) / "package.zip"
        write_archive(draft.package, archive)
        submission = Submission(
            attempts.submission_id(run_id, attempt), command.line(), about, draft.needs,
            runtime_env(spec.submit, draft.variables.given, grace_s), archive, draft.variables.taken,
        )  # fmt: skip
        try:
            api.submit(submission)
        except AlreadySubmitted as error:
            raise UsageError(
                f"run {run_id!r} was just submitted by another client; follow it with "
                f"`elastic logs {run_id} -f --address {address}`"
            ) from error
        except Unreachable as error:
            # The job may have been accepted although the answer was lost.
            raise Unreachable(
                f"{error.message}; check whether it has accepted run {run_id!r} nevertheless: "
                f"`elastic status {run_id} --address {address}`"
            ) from error
    say(f"run {run_id} is submitted as {submission.submission_id} and stored in {draft.storage}")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]

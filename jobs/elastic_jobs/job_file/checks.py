"""Every check of a job that needs more than one key of it, made before anything starts.

All front ends (`submit`, `kube render`, `ElasticTrainer`) call `check`, which neither writes nor starts anything. Those
that start the run from this machine (`run`, `resume`) call `check_plan`, which also imports user code and writes to
storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.errors import IntegrityError, StorageError, UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.core.names import check_run_id
from elastic.core.policy.communication import refused_beside, refused_communication, refused_in_rounds
from elastic.core.run.phase import FINISHED
from elastic.core.secrets import check_options, check_url
from elastic.core.settings import RunSettings
from elastic.engines.select import ENGINES, check_config, check_engine
from elastic.entrypoint import load_entry_point, parse_entry_point
from elastic_jobs.running.backend import check_nodes, growth
from elastic_jobs.running.follow import check_summary_file
from elastic_jobs.running.run_plan import Job, Place, RunPlan

# A store that does not answer within this time is unusable; users should not wait for minutes to learn that.
_CHECK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """A reason not to start: the key or option it is about, and a sentence with the problem and its remedy."""

    key: str
    sentence: str


def refuse(findings: Sequence[Finding]) -> None:
    """Raises UsageError with the first finding, and the keys of the others."""
    if not findings:
        return
    first, *others = findings
    keys = ", ".join(dict.fromkeys(finding.key for finding in others))
    raise UsageError(f"{first.sentence} (also wrong: {keys})" if others else first.sentence)


def check(job: Job) -> list[Finding]:
    """The problems of the job, wherever it will run. Starts and writes nothing."""
    settings = job.settings
    return [
        *_found("run id", check_run_id, settings.run_id),
        *_found("storage_url", check_url, settings.storage_url),
        *_found("checkpoint.url", check_url, settings.checkpoint.url),
        # Options are stored next to the journal, so they must hold no secret.
        *_found("config", check_options, job.config, "config"),
        *(_found("weights.source", check_url, settings.weights.source) if settings.weights is not None else ()),
        *_found(settings.engine, check_options, settings.engine_config or {}, settings.engine),
        *_found("engine", check_engine, settings.engine),
        *_found(settings.engine, _check_engine_config, settings),
        *_found("communication", _check_communication, settings),
    ]


def check_plan(plan: RunPlan) -> list[Finding]:
    """As `check`, and the problems of starting the job from this machine. If there are none, imports the entry point,
    then writes, reads and removes a small object in every place that the run will write to."""
    job = plan.job
    found = [*check(job), *_found("place", _check_place, job.settings, plan.place)]
    if found:
        return found
    found = [
        *_found("--summary", check_summary_file, plan.output.summary_file),
        *_found("entry_point", _import_entry_point, job),
        *_found("deepspeed", _check_monitors, job.settings),
        *_found("weights", _check_weights, job.settings),
    ]
    return found or list(_found("storage", check_storage, job.settings))


def check_storage(settings: RunSettings) -> None:
    """Raises UsageError for storage that cannot be written: nothing has been started, so the user can correct it."""
    from elastic.checkpoint.storage import CheckpointStore

    for url in dict.fromkeys((settings.storage_url, settings.checkpoint.url)):
        try:
            CheckpointStore(url, settings.run_id, timeout_s=_CHECK_TIMEOUT_S).check_writable()
        except StorageError as error:
            raise UsageError(f"{error.message}; nothing was started") from error


def check_new_end(run_id: str, summary: Mapping[str, Any], max_steps: int | None) -> None:
    """Raises UsageError for a new end of a resumed run before its last finished step, by `summary` of its journal."""
    saved = [entry.get("step") or 0 for entry in summary.get("checkpoints") or ()]
    done = max([summary.get("steps") or 0, *saved])
    if max_steps is not None and max_steps < done:
        raise UsageError(
            f"--max-steps {max_steps} is below the {done} steps that run {run_id!r} has done already; "
            "nothing was changed"
        )


def check_seed(run_id: str, before: Any, now: int) -> None:
    """Raises UsageError for another seed than the run was started with."""
    if before != now:
        raise UsageError(
            f"run {run_id!r} was started with seed {before}, not {now}: with another seed samples would be seen twice; "
            "set it back, or start under another --run-id"
        )


def is_done(summary: Mapping[str, Any], max_steps: int | None) -> bool:
    """Whether a run has reached its end, and `max_steps` (None: the run's own) is not a later one."""
    return summary.get("status") == FINISHED and max_steps in (None, summary.get("steps"))


def _found(key: str, check: Callable[..., object], *arguments: Any) -> Iterator[Finding]:
    try:
        check(*arguments)
    except UsageError as error:
        yield Finding(key, error.message)


def _check_engine_config(settings: RunSettings) -> None:
    """Options that an elastic run cannot honour, and contradicting batch sizes."""
    if settings.engine_config is not None and settings.engine in ENGINES:
        batch = BatchSettings.of(settings)
        for mesh in map(settings.mesh.shape, settings.mesh.axes):
            # Where several meshes are possible, the fewest workers need not form a cell of each.
            most = max(1, settings.scaling.max_workers // mesh.readers)
            fewest = min(most, -(-settings.scaling.min_workers // mesh.readers))
            check_config(settings.engine, settings.engine_config, batch, (fewest, most), mesh.tp, mesh.ep, mesh.pp)


def _check_communication(settings: RunSettings) -> None:
    asked, config = settings.communication, settings.engine_config
    if asked is not None and (
        refused := refused_communication(asked, settings.engine, settings.mesh.tp, settings.mesh.ep, settings.mesh.pp)
        or refused_beside(config or {}, asked.semantics)
        or refused_in_rounds(
            asked,
            settings.mesh.sp,
            settings.audit.every_steps is not None,
            settings.gradient_noise.every_steps is not None,
            settings.anomalies.policy,
        )
    ):
        raise UsageError(refused)


def _check_monitors(settings: RunSettings) -> None:
    """Only where the workers have this machine's packages."""
    if settings.engine != "deepspeed":
        return
    from elastic.engines.deepspeed.monitors import refuse_missing

    try:
        refuse_missing(settings.engine_config or {})
    except UsageError as error:
        raise UsageError(f"deepspeed: {error.message}") from error


def _check_weights(settings: RunSettings) -> None:
    """The source must not be empty. Workers, which have the model, compare names and shapes before any step."""
    from elastic.store.open import open_objects

    if settings.weights is None:
        return
    source = settings.weights.source
    try:
        empty = not open_objects(source, _CHECK_TIMEOUT_S).names("")
    except (StorageError, IntegrityError) as error:
        raise UsageError(f"weights: {source} cannot be read: {error.message}") from error
    if empty:
        raise UsageError(f"weights: {source} is empty or does not exist")


def _check_place(settings: RunSettings, place: Place) -> None:
    """Nodes, addresses and faults that contradict each other or the job."""
    if place.faults.faults and place.address is not None:
        raise UsageError("--chaos works on a local cluster only; leave out --address")
    if place.autoscale:
        if place.address is not None:
            raise UsageError("--autoscale starts a local cluster; leave out --address")
        growth(settings, place)
    elif place.max_nodes is not None:
        raise UsageError("--max-nodes goes with --autoscale; without it say --nodes")
    elif place.nodes is not None:
        check_nodes(place.nodes, settings)


def _import_entry_point(job: Job) -> None:
    load_entry_point(parse_entry_point(job.entry_point, job.folder))

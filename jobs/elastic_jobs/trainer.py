"""`ElasticTrainer`: Ray Train's shape, so that a Ray Train user changes one import."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray.train import Checkpoint, Result, RunConfig, ScalingConfig

from elastic.checkpoint.folder import explain
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.errors import (
    ElasticError,
    GaveUp,
    IntegrityError,
    NoCapacity,
    UsageError,
    UserCodeError,
)
from elastic.core.settings import AnomalySettings, FailureSettings, RunSettings, SnapshotSettings, StragglerSettings
from elastic.entrypoint import check_function
from elastic.observe.journal import JournalReader
from elastic.observe.records import Record
from elastic.observe.steps import step_rows
from elastic.observe.summary import summarize
from elastic.runtime.driver import client
from elastic.runtime.train_function import Entry
from elastic_jobs.display import open_display
from elastic_jobs.job_file.checks import check, check_storage, refuse
from elastic_jobs.job_file.load import parse_job
from elastic_jobs.job_file.yaml_lines import Document
from elastic_jobs.ray_train_config import job_keys, refused_arguments, refused_fields
from elastic_jobs.running.follow import follow
from elastic_jobs.running.run_plan import Job

logger = logging.getLogger(__name__)

_ERRORS: dict[str, type[ElasticError]] = {
    "user-code-failed": UserCodeError,
    "usage": UsageError,
    "gave-up": GaveUp,
    "no-capacity": NoCapacity,
    "integrity": IntegrityError,
    "not-finished": ElasticError,
}


class _OnWorker(Exception):
    """A worker's traceback, shown as the cause of the error that the driver gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ElasticTrainer:
    """Trains `train_loop_per_worker` on as many workers as there are, between the two ends of `num_workers`.

    `scaling_config.num_workers` is a number or a pair (min, max). `run_config.storage_path` holds checkpoints and the
    journal; `run_config.name` is the run's id: an existing run continues from its newest checkpoint. The other
    arguments are keys of a job file (docs/job.md); `job` takes those that have no argument of their own, for example
    `job={"spare_slots": 1}`. Options of Ray Train that a run cannot honour are refused by name.

    Raises UsageError for wrong arguments, before anything is started.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        deepspeed_config: Mapping[str, Any] | str | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        max_steps: int | None = None,
        epochs: int | None = None,
        checkpoint_every_steps: int | None = None,
        snapshots: SnapshotSettings | None = None,
        failures: FailureSettings | None = None,
        anomalies: AnomalySettings | None = None,
        stragglers: StragglerSettings | None = None,
        seed: int = 0,
        job: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        scaling, run = scaling_config or ScalingConfig(num_workers=1), run_config or RunConfig()
        refuse([*refused_arguments(others), *refused_fields(scaling, run)])
        check_function(train_loop_per_worker, "train_loop_per_worker")
        if train_loop_config is not None and not isinstance(train_loop_config, Mapping):
            raise UsageError(f"train_loop_config must be a dictionary, not {type(train_loop_config).__name__}")
        self._function = train_loop_per_worker
        self._config = train_loop_config
        keys = job_keys(scaling, run)
        if checkpoint_every_steps is not None:
            keys["checkpoint"]["every_steps"] = checkpoint_every_steps
        sections = {"snapshots": snapshots, "failures": failures, "anomalies": anomalies, "stragglers": stragglers}
        given = {
            "deepspeed": deepspeed_config, "global_batch": global_batch, "micro_batch": micro_batch,
            "max_steps": max_steps, "epochs": epochs, "seed": seed or None,
            **{name: None if section is None else asdict(section) for name, section in sections.items()},
        }  # fmt: skip
        keys.update({name: value for name, value in given.items() if value is not None})
        twice = sorted(keys.keys() & (job or {}).keys())
        if twice:
            raise UsageError(f"ElasticTrainer: {twice[0]!r} is given in job={{...}} and as another argument; keep one")
        data = {**keys, **(job or {}), "entry_point": f"{__name__}:ElasticTrainer"}
        spec = parse_job(Document("ElasticTrainer", data), Path.cwd())
        self.settings = spec.settings(str(run.name), str(spec.storage_url))
        refuse(check(Job(self.settings, spec.entry_point)))

    def fit(self) -> Result:
        """Run to the end and return Ray Train's Result. Raises the run's error, as an `ElasticError` of its kind.

        An interrupt (Ctrl-C) asks the run for a last checkpoint before it is passed on.
        """
        check_storage(self.settings)
        client.connect(None, show_prints=True)
        handle = client.start(self.settings, Entry.of(self._function, self._config))
        display = open_display(sys.stderr)
        try:
            result = follow(handle, display)
        except KeyboardInterrupt:
            handle.stop("interrupted")
            handle.result(self.settings.failures.drain_timeout_s)
            raise
        finally:
            display.close()
        handle.leave()
        return self._result(result)

    def _result(self, result: Mapping[str, Any]) -> Result:
        store = CheckpointStore(self.settings.checkpoint.url, self.settings.run_id)
        newest = next(iter(store.list()), None)
        folder = f"{self.settings.checkpoint.url.rstrip('/')}/{self.settings.run_id}"
        checkpoint = _checkpoint(f"{folder}/checkpoints/{newest.id}") if newest else None
        error_type = _ERRORS.get(str(result["status"]))
        if error_type is not None:
            remote = result.get("error")
            raise error_type(str(result["reason"])) from (_OnWorker(remote) if remote else None)
        own = {"loss": result.get("loss"), "step": result.get("step"), "status": result["status"]}
        records = _history(self.settings)
        summary = summarize(records or ())
        # What the run has cost, and what its gradients say of its batch: see docs/laws.md.
        own |= {key: summary[key] for key in ("compute", "gradient_noise")}
        frame = None if records is None else _frame(records)
        # The run's own names win: a user's metric `step` is in the table under `metrics.step`.
        metrics = {**(result.get("metrics") or {}), **own}
        return Result(metrics=metrics, checkpoint=checkpoint, path=folder, error=None, metrics_dataframe=frame)


def _checkpoint(url: str) -> Checkpoint:
    try:
        explain(url)
    except ElasticError as error:
        logger.warning("no README was put into %s: %s", url, error)
    return Checkpoint(url)


def _frame(records: Sequence[Record]) -> Any:
    """A pandas DataFrame with one row per step of the final timeline."""
    import pandas  # type: ignore[import-untyped]

    return pandas.DataFrame(step_rows(records))


def _history(settings: RunSettings) -> Sequence[Record] | None:
    """The run's journal; None where it cannot be read."""
    try:
        return JournalReader(settings.storage_url, settings.run_id).records()
    except ElasticError as error:
        logger.warning("metrics_dataframe is None: %s", error)
        return None

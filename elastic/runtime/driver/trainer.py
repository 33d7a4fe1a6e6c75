"""`ElasticTrainer`: Ray Train's shape, so that a Ray Train user changes one import."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.train import Checkpoint, Result, RunConfig, ScalingConfig

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.errors import (
    ElasticError,
    GaveUp,
    IntegrityError,
    NoCapacity,
    UsageError,
    UserCodeError,
)
from elastic.core.settings import (
    AnomalySettings,
    CheckpointSettings,
    FailureSettings,
    RunSettings,
    ScalingSettings,
    SnapshotSettings,
    StragglerSettings,
)
from elastic.observe.journal import JournalReader
from elastic.observe.steps import step_rows
from elastic.runtime.driver import client
from elastic.runtime.train_function import Entry

logger = logging.getLogger(__name__)

_ERRORS: dict[str, type[ElasticError]] = {
    "user-code-failed": UserCodeError,
    "usage": UsageError,
    "gave-up": GaveUp,
    "no-capacity": NoCapacity,
    "integrity": IntegrityError,
    "not-finished": ElasticError,
}
_POLL_S = 5.0


class _OnWorker(Exception):
    """A worker's traceback, shown as the cause of the error that the driver gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ElasticTrainer:
    """Trains `train_loop_per_worker` on as many workers as there are, between the two ends of `num_workers`.

    `scaling_config.num_workers` is a number or a pair (min, max). `run_config.storage_path` holds checkpoints and the
    journal; `run_config.name` is the run's id: an existing one goes on from its newest checkpoint. The rest is this
    project's: `deepspeed_config`, batches, steps, checkpoint cadence and `failures` (all timeouts and budgets).
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        deepspeed_config: Mapping[str, Any] | None = None,
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
    ) -> None:
        self._function = train_loop_per_worker
        self._config = train_loop_config
        scaling = scaling_config or ScalingConfig(num_workers=1)
        run = run_config or RunConfig()
        storage = str(run.storage_path or Path.home() / "ray_results")
        keep = run.checkpoint_config.num_to_keep if run.checkpoint_config else None
        self.settings = RunSettings(
            run_id=run.name or f"elastic-{uuid.uuid4().hex[:8]}",
            seed=seed,
            scaling=_scaling(scaling),
            global_batch=global_batch,
            micro_batch=micro_batch,
            max_steps=max_steps,
            epochs=epochs,
            checkpoint=CheckpointSettings(storage, checkpoint_every_steps, keep or 2),
            snapshots=snapshots or SnapshotSettings(),
            failures=failures or _failures(run),
            anomalies=anomalies or AnomalySettings(),
            stragglers=stragglers or StragglerSettings(),
            resources_per_worker=_resources(scaling),
            deepspeed_config=deepspeed_config,
            storage_url=storage,
        )

    def fit(self) -> Result:
        """Run to the end and return Ray Train's Result. Raises the run's error, as an `ElasticError` of its kind.

        An interrupt (Ctrl-C) asks the run for a last checkpoint before it is passed on.
        """
        CheckpointStore(self.settings.checkpoint.url, self.settings.run_id).check_writable()
        client.connect(None, show_prints=True)
        handle = client.start(self.settings, Entry.of(self._function, self._config))
        try:
            result = None
            while result is None:
                result = handle.result(_POLL_S)
        except KeyboardInterrupt:
            handle.stop("interrupted")
            handle.result(self.settings.failures.drain_timeout_s)
            raise
        handle.leave()
        return self._result(result)

    def _result(self, result: Mapping[str, Any]) -> Result:
        store = CheckpointStore(self.settings.checkpoint.url, self.settings.run_id)
        newest = next(iter(store.list()), None)
        folder = f"{self.settings.checkpoint.url.rstrip('/')}/{self.settings.run_id}"
        checkpoint = Checkpoint(f"{folder}/checkpoints/{newest.id}") if newest else None
        error_type = _ERRORS.get(str(result["status"]))
        if error_type is not None:
            remote = result.get("error")
            raise error_type(str(result["reason"])) from (_OnWorker(remote) if remote else None)
        own = {"loss": result.get("loss"), "step": result.get("step"), "status": result["status"]}
        frame = _frame(self.settings)
        # The run's own names win: a user's metric `step` is in the table under `metrics.step`.
        metrics = {**(result.get("metrics") or {}), **own}
        return Result(metrics=metrics, checkpoint=checkpoint, path=folder, error=None, metrics_dataframe=frame)


def _frame(settings: RunSettings) -> Any:
    """A pandas DataFrame with one row per step of the final timeline; None where the journal cannot be read."""
    import pandas  # type: ignore[import-untyped]

    try:
        records = JournalReader(settings.storage_url, settings.run_id).records()
    except ElasticError as error:
        logger.warning("metrics_dataframe is None: %s", error)
        return None
    return pandas.DataFrame(step_rows(records))


def _scaling(config: ScalingConfig) -> ScalingSettings:
    workers: Any = config.num_workers
    low, high = workers if isinstance(workers, tuple) else (workers, workers)
    if not 1 <= low <= high:
        raise UsageError(f"num_workers=({low}, {high}): the smaller number comes first and is at least 1")
    return ScalingSettings(min_workers=low, max_workers=high)


def _failures(run: RunConfig) -> FailureSettings:
    """Ray Train's `max_failures` counts what it would retry; here lost nodes need no budget, user code does."""
    retries = run.failure_config.max_failures if run.failure_config else 0
    return FailureSettings(user_error_retries=sys.maxsize if retries < 0 else retries)


def _resources(config: ScalingConfig) -> dict[str, float]:
    given: Any = config.resources_per_worker or {}
    resources: dict[str, float] = dict(given)
    resources.setdefault("CPU", 1.0)
    if config.use_gpu:
        resources.setdefault("GPU", 1.0)
    return resources

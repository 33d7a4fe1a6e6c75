"""Checks of a job that need more than the job file: DeepSpeed's options, secrets, and whether storage takes a run."""

from __future__ import annotations

from elastic.core.errors import StorageError, UsageError
from elastic.core.secrets import check_options
from elastic.core.settings import RunSettings
from elastic_jobs.job_file.spec import JobSpec

# A store that has not answered by then is as good as none: nobody is to wait for minutes to hear that.
_CHECK_TIMEOUT_S = 60.0


def check_deepspeed(spec: JobSpec) -> None:
    """Raises UsageError for options that an elastic run cannot honour and for contradicting batch sizes."""
    if not isinstance(spec.deepspeed, dict):
        return
    from elastic.core.generation_spec import BatchSettings
    from elastic.engines.deepspeed.config import resolve

    batch = BatchSettings(spec.global_batch, spec.micro_batch, spec.max_steps, spec.epochs)
    try:
        resolve(spec.deepspeed, batch, spec.min_workers, spec.max_workers)
    except UsageError as error:
        raise UsageError(f"deepspeed: {error.message}") from error


def check_secrets(spec: JobSpec) -> None:
    """Raises UsageError for options that look like secrets: they would be kept in storage, beside the journal."""
    check_options(spec.config, "config")
    check_options(spec.deepspeed if isinstance(spec.deepspeed, dict) else {}, "deepspeed")


def check_checkpoint_storage(settings: RunSettings) -> None:
    """Writes, reads and removes a small object in every place that the run will write to.

    Raises UsageError: nothing has been started, so whatever is wrong is for the user to change.
    """
    from elastic.checkpoint.storage import CheckpointStore

    for url in dict.fromkeys((settings.storage_url, settings.checkpoint.url)):
        try:
            CheckpointStore(url, settings.run_id, timeout_s=_CHECK_TIMEOUT_S).check_writable()
        except StorageError as error:
            raise UsageError(f"{error.message}; nothing was started") from error

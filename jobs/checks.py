"""Checks of a job that need more than the job file: DeepSpeed's options, and whether storage takes checkpoints."""

from __future__ import annotations

from elastic.core.errors import UsageError
from elastic.core.settings import RunSettings
from jobs.spec import JobSpec


def check_deepspeed(spec: JobSpec) -> None:
    """Raises UsageError for options that an elastic run cannot honour and for contradicting batch sizes."""
    if not isinstance(spec.deepspeed, dict):
        return
    from elastic.training.config import resolve
    from elastic.training.session import BatchSettings

    batch = BatchSettings(spec.global_batch, spec.micro_batch, spec.max_steps, spec.epochs)
    try:
        resolve(spec.deepspeed, batch, spec.min_workers, spec.max_workers)
    except UsageError as error:
        raise UsageError(f"deepspeed: {error.message}") from error


def check_checkpoint_storage(settings: RunSettings) -> None:
    """Writes, reads and removes a small object. Raises UsageError or StorageError."""
    from elastic.checkpoint.storage import CheckpointStore

    CheckpointStore(settings.checkpoint.url, settings.run_id).check_writable()

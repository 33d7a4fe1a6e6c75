"""Ray Train's configuration classes as keys of a job. Fields that are not honoured are refused by name, with the
alternative."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ray.train import RunConfig, ScalingConfig

from elastic_jobs.job_file.checks import Finding

# Why a field is refused, and the alternative. Fields that are neither here nor honoured are refused without a reason.
_REASONS = {
    "ScalingConfig.placement_strategy": "each slot is placed by itself, wherever it fits; leave it out",
    "ScalingConfig.label_selector": "slots are placed by resources; give the nodes a custom resource and request it in "
    "resources_per_worker",
    "ScalingConfig.use_tpu": "there is no engine for TPUs",
    "ScalingConfig.topology": "there is no engine for TPUs",
    "ScalingConfig.elastic_resize_monitor_interval_s": "a run grows and shrinks without polling; leave it out",
    "RunConfig.storage_filesystem": "storage_path takes any fsspec URL",
    "RunConfig.callbacks": "metrics, incidents and checkpoints are in the run's journal: `elastic story`, and "
    "Result.metrics_dataframe",
    "RunConfig.worker_runtime_env": "give it to ray.init(runtime_env=...)",
    "RunConfig.logging_config": "configure logging in the training function",
    "CheckpointConfig.checkpoint_score_attribute": "the newest checkpoints are kept (num_to_keep)",
    "CheckpointConfig.checkpoint_score_order": "the newest checkpoints are kept (num_to_keep)",
    "FailureConfig.controller_failure_limit": "a lost controller is always restarted",
    "FailureConfig.max_preemption_failures": "lost nodes need no budget; leave it out",
    "FailureConfig.relax_collectives_on_preemption": "a node that gives notice is left at a step boundary",
    "FailureConfig.preemption_grace_s": "use failures=FailureSettings(drain_margin_s=...)",
}
_HONOURED = {
    "ScalingConfig.num_workers", "ScalingConfig.use_gpu", "ScalingConfig.resources_per_worker",
    "ScalingConfig.accelerator_type", "RunConfig.name", "RunConfig.storage_path", "RunConfig.failure_config",
    "RunConfig.checkpoint_config", "CheckpointConfig.num_to_keep", "FailureConfig.max_failures",
}  # fmt: skip
# Arguments of Ray Train's trainers that have no meaning here.
_ARGUMENTS = {
    "torch_config": "elastic.initialize makes the process group; see FailureSettings(collective_timeout_s=...)",
    "backend_config": "the backend is DeepSpeed",
    "datasets": "give the dataset to elastic.initialize(training_data=...)",
    "dataset_config": "give the dataset to elastic.initialize(training_data=...)",
    "resume_from_checkpoint": "a run with the same RunConfig(name=..., storage_path=...) continues by itself",
    "metadata": "put it into train_loop_config",
    "validation_config": "validate in the training function",
}
# As Ray Train requests a kind of accelerator: a tiny amount of the resource that such a node has.
_ACCELERATOR = 0.001


def refused_arguments(arguments: Mapping[str, Any]) -> list[Finding]:
    """For arguments of Ray Train's trainers that were given and have no meaning here."""
    return [
        Finding(name, f"ElasticTrainer({name}=...) is not supported: {_ARGUMENTS[name]}")
        if name in _ARGUMENTS
        else Finding(name, f"ElasticTrainer has no argument {name!r}; keys of a job file are given as job={{...}}")
        for name, value in arguments.items()
        if value is not None or name not in _ARGUMENTS
    ]


def refused_fields(scaling: ScalingConfig, run: RunConfig) -> list[Finding]:
    """For fields with another value than the default that are not honoured."""
    found = []
    configs: list[Any] = [scaling, run, run.checkpoint_config, run.failure_config]
    for config in configs:
        defaults = vars(type(config)())
        for name, value in vars(config).items():
            field = f"{type(config).__name__}.{name}"
            if field not in _HONOURED and name in defaults and not _same(value, defaults[name]):
                why = _REASONS.get(field, "this release does not know what it should do")
                found.append(Finding(field, f"{type(config).__name__}({name}=...) is not supported: {why}"))
    return found


def job_keys(scaling: ScalingConfig, run: RunConfig) -> dict[str, Any]:
    """The two configurations as keys of a job file."""
    workers: Any = scaling.num_workers
    low, high = workers if isinstance(workers, tuple) else (workers, workers)
    keep = run.checkpoint_config.num_to_keep if run.checkpoint_config else None
    # Ray Train's budget counts all failures; here lost nodes need no budget, but exceptions of user code do.
    retries = run.failure_config.max_failures if run.failure_config else 0
    return {
        "min_workers": low,
        "max_workers": high,
        "resources_per_worker": _resources(scaling),
        "storage_url": str(run.storage_path),
        "checkpoint": {} if keep is None else {"keep_last": keep},
        "failures": {"user_error_retries": sys.maxsize if retries < 0 else retries},
    }


def _resources(config: ScalingConfig) -> dict[str, Any]:
    resources: dict[str, Any] = dict(config.resources_per_worker or {})  # type: ignore[arg-type]
    resources.setdefault("CPU", 1.0)
    if config.use_gpu:
        resources.setdefault("GPU", 1.0)
    if config.accelerator_type:
        resources.setdefault(f"accelerator_type:{config.accelerator_type}", _ACCELERATOR)
    return {name: float(count) if isinstance(count, int) else count for name, count in resources.items()}


def _same(value: Any, default: Any) -> bool:
    if type(value) is not type(default) or isinstance(value, (int, float, str, list, dict, tuple)):
        return bool(value == default)
    # Objects that Ray makes for itself, such as LoggingConfig().
    return repr(value) == repr(default)

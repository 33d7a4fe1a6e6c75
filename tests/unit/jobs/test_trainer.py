"""`ElasticTrainer`'s constructor: what Ray Train's classes say arrives, and what cannot be honoured is refused by
name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs.trainer import ElasticTrainer
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from elastic.core.errors import UsageError
from elastic.core.settings import GPU_FAILURES, FailureSettings, SnapshotSettings


def train(config: dict[str, Any]) -> None: ...


def refusal(**arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        ElasticTrainer(arguments.pop("train_loop_per_worker", train), **arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_what_ray_trains_classes_say_arrives(tmp_path: Path) -> None:
    settings = ElasticTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=(2, 4), use_gpu=True, accelerator_type="A100"),
        run_config=RunConfig(
            name="gpt",
            storage_path=str(tmp_path),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
            failure_config=FailureConfig(max_failures=-1),
        ),
        deepspeed_config={"train_batch_size": 8},
        max_steps=10,
        checkpoint_every_steps=5,
        snapshots=SnapshotSettings(every_steps=1),
        seed=4,
        job={"spare_slots": 1, "priority": 3},
    ).settings
    assert (settings.run_id, settings.storage_url, settings.seed, settings.max_steps) == ("gpt", str(tmp_path), 4, 10)
    assert (settings.scaling.min_workers, settings.scaling.max_workers) == (2, 4)
    assert (settings.scaling.spare_slots, settings.scaling.priority) == (1, 3)
    assert settings.resources_per_worker == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}
    assert (settings.checkpoint.url, settings.checkpoint.every_steps, settings.checkpoint.keep_last) == (
        str(tmp_path),
        5,
        3,
    )
    assert settings.failures == replace(FailureSettings(user_error_retries=sys.maxsize), **GPU_FAILURES)
    assert settings.snapshots == SnapshotSettings(every_steps=1)
    assert settings.engine_config == {"train_batch_size": 8}


def test_settings_of_failures_win_over_ray_trains_budget() -> None:
    settings = ElasticTrainer(train, failures=FailureSettings(suspect_after_s=2.0)).settings
    assert settings.failures == FailureSettings(suspect_after_s=2.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_steps": "10"}, "ElasticTrainer: 'max_steps' should be a valid integer, but is '10'"),
        ({"max_steps": 1, "epochs": 1}, "max_steps and epochs are both given"),
        ({"checkpoint_every_steps": 0}, "'checkpoint.every_steps' should be greater than or equal to 1, but is 0"),
        ({"train_loop_per_worker": "train"}, "must be a function, but is of type 'str': 'train'"),
        (
            {"train_loop_per_worker": lambda a, b: None},
            "with one argument, the config, but is <lambda>(a, b)",
        ),
        ({"train_loop_config": [1]}, "train_loop_config must be a dictionary, not list"),
        ({"run_config": RunConfig(name="../x")}, "run id '../x'"),
        ({"run_config": RunConfig(storage_path="s3://me:pass@b/x")}, "holds credentials"),
        ({"deepspeed_config": {"elasticity": {}}}, "DeepSpeed option elasticity"),
        ({"deepspeed_config": {"train_batch_size": 3}, "global_batch": 4}, "global_batch 4"),
        ({"scaling_config": ScalingConfig(num_workers=(0, 2))}, "'min_workers' should be greater than or equal to 1"),
        ({"failures": FailureSettings(heartbeat_s=2.0)}, "heartbeat_s (2.0) must be below suspect_after_s"),
        ({"job": {"spare_slot": 1}}, "unknown key 'spare_slot'; did you mean 'spare_slots'?"),
        ({"job": {"max_steps": 3}, "max_steps": 4}, "'max_steps' is given in job={...} and as another argument"),
        ({"max_stepz": 3}, "ElasticTrainer has no argument 'max_stepz'"),
        ({"datasets": {"train": 1}}, "ElasticTrainer(datasets=...) is not supported: give the dataset to"),
        ({"torch_config": object()}, "ElasticTrainer(torch_config=...) is not supported"),
        ({"resume_from_checkpoint": object()}, "continues by itself"),
        ({"scaling_config": ScalingConfig(label_selector={"a": "b"})}, "ScalingConfig(label_selector=...) is not"),
        (
            {"scaling_config": ScalingConfig(placement_strategy="SPREAD")},
            "ScalingConfig(placement_strategy=...)",
        ),
        ({"run_config": RunConfig(worker_runtime_env={"pip": ["x"]})}, "RunConfig(worker_runtime_env=...) is not"),
        (
            {"run_config": RunConfig(checkpoint_config=CheckpointConfig(2, "loss"))},
            "CheckpointConfig(checkpoint_score_attribute=...) is not supported: the newest checkpoints are kept",
        ),
        (
            {"run_config": RunConfig(failure_config=FailureConfig(preemption_grace_s=3.0))},
            "FailureConfig(preemption_grace_s=...) is not supported: use failures=FailureSettings(drain_margin_s=...)",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_sentence(arguments: dict[str, Any], said: str) -> None:
    assert said in refusal(**arguments)


def test_a_field_that_ray_adds_is_refused_too() -> None:
    scaling = ScalingConfig()
    object.__setattr__(scaling, "elastic_resize_monitor_interval_s", 5.0)
    assert "ScalingConfig(elastic_resize_monitor_interval_s=...)" in refusal(scaling_config=scaling)

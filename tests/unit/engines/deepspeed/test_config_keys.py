"""Keys that DeepSpeed would ignore without a word are refused with the nearest valid one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.deepspeed.config import read_config, resolve

_BATCH = BatchSettings(global_batch=8, micro_batch=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # Trained at stage 0 by DeepSpeed 0.19.8, without a word.
        ({"zero_optimisation": {"stage": 2}}, "'zero_optimisation'; did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stagee": 2}}, "'zero_optimization.stagee'; did you mean 'stage'?"),
        ({"stage": 2}, "'stage'; 'stage' belongs under 'zero_optimization'"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
            "'zero_optimization.offload_optimizer.devise'; did you mean 'device'?",
        ),
        (
            {"activation_checkpointing": {"cpu_checkpoint": True}},
            "'activation_checkpointing.cpu_checkpoint'; did you mean 'cpu_checkpointing'?",
        ),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
        ({"torch_autocast": {"dtypes": "bfloat16"}}, "did you mean 'dtype'?"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean 'grad_accum_dtype'?"),
        ({"optimizer": {"typ": "AdamW"}}, "'optimizer.typ'; did you mean 'type'?"),
        ({"optimizer": {"type": "AdanW"}}, "optimizer.type: unknown 'AdanW'; did you mean 'AdamW'?"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_deacy": 0.1}}},
            "optimizer.params: AdamW has no parameter 'weight_deacy'; did you mean 'weight_decay'?",
        ),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type: unknown 'WarmupLr'; did you mean 'WarmupLR'?"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
            "WarmupLR has no parameter 'warmup_steps'; did you mean 'warmup_num_steps'?",
        ),
    ],
)
def test_a_slip_of_the_pen_is_refused_with_the_nearest_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(config, _BATCH, 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "betas": [0.9, 0.95]}}},
        {"optimizer": {"type": "adamW", "params": {"lr": 1e-3}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}},
        {"optimizer": {"type": "MuAdam", "params": {"anything": 1}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}},
        {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10, "wall_clock_breakdown": False},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto", "overlap_comm": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        {"csv_monitor": {"enabled": True, "output_path": "x", "job_name": "y"}, "comms_logger": {"enabled": False}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"anything": 1}}},
    ],
)
def test_what_deepspeed_reads_is_taken(config: dict[str, Any]) -> None:
    resolve(config, _BATCH, 2)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "bf16": {"enabled": true}, "train_batch_size": 16}')
    with pytest.raises(UsageError, match="the key 'train_batch_size' is given twice"):
        read_config(path)


@pytest.mark.parametrize("name", ["Lamb", "Adafactor", "LBFGS"])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_zero_cuts_them(name: str) -> None:
    config = {"optimizer": {"type": name}, "zero_optimization": {"stage": 2}}
    with pytest.raises(UsageError, match=f"optimizer {name} cannot be used with ZeRO stages 1 to 3 here: .*use AdamW"):
        resolve(config, _BATCH, 2)
    resolve(config | {"zero_optimization": {"stage": 0}}, _BATCH, 2)

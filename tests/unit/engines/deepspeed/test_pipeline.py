"""What of a DeepSpeed configuration is refused where ranks have different layers, and the batch figures."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.deepspeed.config import check, resolve

GIVEN = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
STAGE1 = {**GIVEN, "zero_optimization": {"stage": 1}}


def test_a_pipelines_samples_count_once() -> None:
    made = resolve(STAGE1, BatchSettings(), 3, cell=4, pp=4)
    assert made.micro_steps == 4
    assert made.native["train_batch_size"] == 24, "of 3 pipelines with 4 micro-batches of 2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage is 2: DeepSpeed's pipelines train with stages 0 and 1"),
        ({"zero_optimization": {"stage": 3}}, "stage is 3: DeepSpeed's pipelines train with stages 0 and 1"),
        ({}, "gradient_clipping is 1 (1 is its default), and the job's mesh says pp: 2"),
        ({"gradient_clipping": 0.5}, "by the norm of the first stage's layers alone"),
        ({"bf16": {"enabled": True}}, "stage is 0 with bf16, fp16 or torch_autocast, and the job's mesh says pp: 2"),
        ({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}, "autotp_size is 2, and the job's"),
        ({"zero_optimization": {"stage": 1}, "expert_parallel": {"autoep_size": 2}}, "autoep_size is 2, and the job's"),
    ],
)
def test_what_is_refused_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check({**GIVEN, **given}, BatchSettings(), (2, 4), pp=2)
    assert said in caught.value.message


@pytest.mark.parametrize("given", [STAGE1, {**GIVEN, "gradient_clipping": 0}])
def test_these_are_not(given: dict[str, Any]) -> None:
    check(given, BatchSettings(), (2, 4), pp=2)

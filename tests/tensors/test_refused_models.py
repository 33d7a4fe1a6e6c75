"""Models that DeepSpeed cannot train are refused by name before an engine is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.core.policy.communication import refused_hook
from elastic.engines.base import ResolvedConfig, UserObjects
from elastic.engines.deepspeed.kind import KIND
from elastic.engines.deepspeed.refused import refuse_model, refuse_without_values, refuse_wrapped
from elastic.engines.model.placeholders import placeholder
from elastic.engines.select import engine_kind


def test_a_model_on_the_meta_device_is_refused_and_a_placeholder_of_zero_init_is_not() -> None:
    refuse_without_values(nn.Linear(2, 2), begins=True)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"parameter '0.weight' is on the meta device and has no values"):
        refuse_without_values(model, begins=True)
    for parameter in model.parameters():
        parameter.ds_id = 0  # type: ignore[attr-defined]
    refuse_without_values(model, begins=True)


def test_values_that_were_given_up_are_refused_where_nothing_restores_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.data = placeholder(model[0].weight, (2, 2))
    refuse_without_values(model, begins=False)
    with pytest.raises(UsageError, match=r"parameter '0.weight' has no values: they were lost with a worker"):
        refuse_without_values(model, begins=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wrapped_by_the_compiler_is_refused_at_stage_3_alone(stage: int) -> None:
    config = {"zero_optimization": {"stage": stage}}
    model = nn.Sequential(nn.Linear(2, 2))
    refuse_wrapped(model, config)
    model.compile(backend="eager")
    refuse_wrapped(model, config)
    model[0] = torch.compile(model[0], backend="eager")
    if stage < 3:
        refuse_wrapped(model, config)
        return
    with pytest.raises(UsageError, match=r"stage 3 cannot train module '0' as torch.compile has wrapped it"):
        refuse_wrapped(model, config)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_an_earlier_generation_has_sliced_is_refused_without_shared_layers_too() -> None:
    """In a run whose generations share layers by other numbers, or not at all."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.ds_autotp_parsed = True  # type: ignore[assignment]
    resolved = ResolvedConfig({"train_micro_batch_size_per_gpu": 2}, 8, 2, 4, tp_sizes=(1, 2))
    with pytest.raises(UsageError, match="has been sliced by tensor parallelism before, which cannot be undone"):
        KIND.build(resolved, None, torch.device("cpu"), UserObjects(model))


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_script_asks_for_is_refused_for_other_generations_too(tp: int) -> None:
    spec = GenerationSpec("run", 1, 0, 2, tp=tp, tp_sizes=(1, 2), batch=BatchSettings(8, 2))
    KIND.resolve({}, spec)
    with pytest.raises(UsageError, match=r"autotp_size is 2, and the job's mesh says tp: 1"):
        KIND.resolve({"tensor_parallel": {"autotp_size": 2}}, spec)
    fsdp2 = engine_kind("fsdp2")
    fsdp2.resolve({}, spec)
    with pytest.raises(UsageError, match=r"shard_workers is 2, and mesh: {tp: 2} makes cells of 2 workers"):
        fsdp2.resolve({"shard_workers": 2}, spec)


def test_every_hook_of_torch_is_known() -> None:
    assert [kind.name for kind in DDPCommHookType if refused_hook(kind.name) is None] == []


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (default_hooks.fp16_compress_hook, "fp16_compress_hook is a communication hook of torch's"),
        (
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
            "fp16_compress_wrapper_hook is a communication hook of torch's",
        ),
        (powerSGD_hook.powerSGD_hook, "{semantics: error_feedback, strategy: power_sgd, rank: N}"),
        (quantization_hooks.quantization_pertensor_hook, "{semantics: error_feedback, strategy: int8}"),
        (post_localSGD_hook.post_localSGD_hook, "{semantics: local, strategy: local_sgd, every_steps: N}"),
        (None, "the model is wrapped in DistributedDataParallel; pass the model itself"),
    ],
)
def test_a_hook_of_the_models_ddp_is_refused_with_what_does_the_same(alone: None, hook: Any, said: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    if hook is not None:
        model.register_comm_hook(None, hook)
    with pytest.raises(UsageError, match=re.escape(said)):
        refuse_model(model)


def test_a_hook_of_the_users_own_is_refused_by_its_name(alone: None) -> None:
    # Without annotations: torch compares them, and here they are strings.
    def mine(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.allreduce_hook(state, bucket)

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, mine)
    with pytest.raises(UsageError, match="the communication hook mine of the model's Distributed"):
        refuse_model(model)

"""Models that DeepSpeed cannot train are refused by name before an engine is built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.refused import refuse_without_values, refuse_wrapped


def test_a_model_on_the_meta_device_is_refused_and_a_placeholder_of_zero_init_is_not() -> None:
    refuse_without_values(nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"parameter '0.weight' is on the meta device and has no values"):
        refuse_without_values(model)
    for parameter in model.parameters():
        parameter.ds_id = 0  # type: ignore[attr-defined]
    refuse_without_values(model)


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

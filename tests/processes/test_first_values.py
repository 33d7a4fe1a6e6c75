"""A run that begins again in the same processes, before anything of it was saved, with a model that is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from test_oracle import _assert_ended
from torch import nn

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.training.user.first_values import require_first_values

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "config",
    [
        {"stage": 1},
        {"stage": 3},
        {"engine": "fsdp2"},
        {"stage": 3, "in_loop": True},
        {"engine": "fsdp2", "in_loop": True},
    ],
    ids=["stage1", "stage3", "fsdp2", "stage3-in-loop", "fsdp2-in-loop"],
)
def test_a_run_does_not_begin_with_what_a_lost_generation_has_made(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    config = {**config, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(epochs=2), "max_world_size": 4}
    if config.get("engine"):
        more["engine"] = config["engine"]
    _assert_ended(crew.run([0, 1], "module_model.train", config, end_at=4, **more), "ended", 4)
    for outcome in crew.run([0, 1], "module_model.train", config, **more):
        assert outcome.result.kind == "usage_error", outcome.result
        assert "of the model is not what it was when the run began" in outcome.result.message
        assert outcome.reports == []


def spec(generation: int, run_id: str = "run", checkpoint: str | None = None) -> GenerationSpec:
    return GenerationSpec(
        run_id=run_id, generation=generation, rank=0, world_size=1, seed=0, batch=BatchSettings(), checkpoint=checkpoint
    )


def test_buffers_that_passes_have_changed_count_as_well() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("none", torch.empty(0, dtype=torch.bool))
    require_first_values(model, spec(1))
    model.cache.add_(1.0)  # type: ignore[operator, union-attr]
    require_first_values(model, spec(2))
    model(torch.randn(8, 4))
    with pytest.raises(UsageError, match=r"'0.running_mean' of the model is not what it was"):
        require_first_values(model, spec(3))


def test_what_was_not_trained_may_begin_again() -> None:
    model = nn.Linear(4, 4)
    require_first_values(model, spec(1))
    require_first_values(model, spec(2))
    with torch.no_grad():
        model.bias.add_(1.0)
    require_first_values(model, spec(3, checkpoint="step-00000001-g0002"))
    with pytest.raises(UsageError, match="'bias' of the model is not what it was"):
        require_first_values(model, spec(4))
    # Trained further by another run, or by the next one of a process without a cluster.
    require_first_values(model, spec(1))
    require_first_values(model, spec(7, run_id="another"))

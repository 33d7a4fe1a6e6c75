"""ZeRO stage 3: passes of a model that uses a weight outside of its module in some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepspeed_scripts import Numbers, run, settings
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
# No weight is whole but in its module's passes.
APART = {f"stage3_{name}": 0 for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")}


class Headed(nn.Module):
    """Scores by its head's weight, as libraries do that fuse the head with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor, scores: bool = False) -> torch.Tensor:
        hidden = self.body(x)
        return nn.functional.linear(hidden, self.head.weight) if scores else self.head(hidden)


def initialized() -> tuple[Headed, Any, Any]:
    """The model, its engine and its loader."""
    import elastic

    torch.manual_seed(1)
    config = settings(3, train_micro_batch_size_per_gpu=3)
    config["zero_optimization"] |= APART
    model = Headed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, _, loader, _ = elastic.initialize(model=model, optimizer=optimizer, training_data=Numbers(), config=config)
    return model, engine, loader


@pytest.mark.parametrize("trained", [False, True])
def test_passes_by_module_and_by_weight_take_turns(tmp_path: Path, trained: bool) -> None:
    """DeepSpeed's "tracing error" where the order of two passes was recorded before the first by weight."""
    made: list[tuple[torch.Tensor, ...]] = []

    def train() -> None:
        model, engine, loader = initialized()
        for x, _ in loader:
            with torch.no_grad():
                found = [model(x) for _ in range(2)]
                found += [model(x, scores=True), model(x), model(x, scores=True)]
            made.append(tuple(found))
            engine.backward(engine(x, scores=trained).mean())
            engine.step()

    run(train, tmp_path)
    assert len(made) == 4
    for first, *others in made:
        for other in others:
            torch.testing.assert_close(other, first)


def test_weights_are_whole_for_as_long_as_they_are_gathered(tmp_path: Path) -> None:
    made: list[tuple[torch.Tensor, ...]] = []
    shapes: list[tuple[bool, ...]] = []

    def whole(model: Any) -> bool:
        return all(parameter.numel() == parameter.ds_numel for parameter in model.parameters())

    def train() -> None:
        model, engine, loader = initialized()
        for x, _ in loader:
            with torch.no_grad():
                apart = (model(x), model(x, scores=True))
                before = whole(model)
                with engine.gathered():
                    within = [whole(model)]
                    together = (model(x), model(x, scores=True), model(x))
                    within.append(whole(model))
                shapes.append((before, *within, whole(model)))
            made.append((*apart, *together, model(x)))
            engine.backward(engine(x).mean())
            engine.step()

    run(train, tmp_path)
    assert shapes == [(False, True, True, False)] * 4
    for first, *others in made:
        for other in others:
            torch.testing.assert_close(other, first)
    assert not torch.equal(made[0][0], made[-1][0])

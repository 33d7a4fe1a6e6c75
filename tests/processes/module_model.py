"""A training function whose model is its module's: there is one for all its calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import crew
import torch
import trainings

import elastic


@cache
def model_of(url: str) -> torch.nn.Module:
    """Of one run: the process has several."""
    torch.manual_seed(3)
    return trainings.Small(0.0)


def train(config: dict[str, Any]) -> None:
    model = model_of(config["url"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    try:
        engine, _, loader, _ = elastic.initialize(
            model=model,
            training_data=trainings.Numbers(37, torch.float32),
            optimizer=optimizer,
            **trainings.of_engine(config, optimizer),
        )
    except elastic.UsageError:
        # It has the groups of the generation that is over.
        model_of.cache_clear()
        raise
    for _ in elastic.epochs():
        for batch in loader:
            trainings.one_pass(engine, batch)
    crew.told.update(over=True)

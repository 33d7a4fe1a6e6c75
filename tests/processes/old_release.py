"""What tests/data has a checkpoint of, by the release of 2026-11-21: two ranks, stage 2, after two steps."""

from __future__ import annotations

from typing import Any

import crew
import torch
from torch import nn

import elastic


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        training_data=Numbers(),
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": config["stage"]},
            "zero_allow_untested_optimizer": True,
        },
    )
    crew.told["seen"] = elastic.state.get("seen")
    for _ in elastic.epochs():
        for x, y in loader:
            engine.backward(((engine(x) - y) ** 2).mean())
            engine.step()

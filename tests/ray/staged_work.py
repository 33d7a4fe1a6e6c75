"""A training function whose layers are shared out in stages by torch's pipelining; steered as those of `loops`."""

from __future__ import annotations

from typing import Any

import loops
import torch
from layered_model import loss_of, texts
from staged_model import ROW, Staged, trained

import elastic


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    data, model = texts(config["size"]), Staged(0.1, tied=True)
    optimizer = torch.optim.AdamW(trained(model), lr=0.02)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=optimizer,
        pipeline=elastic.Pipeline(loss_of, layers=ROW),
        **loops.of_engine(config, optimizer),
    )
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for batches in loader:
            loops.slow_stages(config)
            engine.train_batch(batches)

"""A training function whose layers are shared out in stages; steered as those of `loops`."""

from __future__ import annotations

from typing import Any

import loops
import torch
from layered_model import texts
from pipeline_model import layers, loss_of

import elastic


def train(config: dict[str, Any]) -> None:
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(3)
    data = texts(config["size"])
    model = PipelineModule(layers=layers(0.1, tied=True), loss_fn=loss_of, partition_method="uniform")
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02),
        config=loops.deepspeed_config({"stage": 1, **config}),
    )
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for batches in loader:
            loops.slow_stages(config)
            engine.train_batch(batches)

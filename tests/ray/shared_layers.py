"""A training function whose layers are shared by the ranks of a cell; steered as those of `loops`."""

from __future__ import annotations

from typing import Any

import loops
import torch
from layered_model import LAYERS, Texts, Transformer, loss_of

import elastic


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    data, model = Texts(config["size"]), Transformer(0.1)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02),
        config={**loops.deepspeed_config(config), "tensor_parallel": {"partition_config": LAYERS}},
    )
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for tokens, labels in loader:
            engine.backward(loss_of(engine(tokens), labels))
            engine.step()

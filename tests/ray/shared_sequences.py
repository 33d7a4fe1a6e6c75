"""A training function whose sequences are shared by the ranks of a cell; steered as those of `loops`."""

from __future__ import annotations

from typing import Any

import loops
import torch
from sequence_model import Texts, Transformer, logits_of, loss_of

import elastic


def train(config: dict[str, Any]) -> None:
    data, model = Texts(config["size"]), Transformer(0.1)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        config=loops.deepspeed_config(config),
    )
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for tokens, labels in loader:
            engine.backward(loss_of(logits_of(engine, tokens), labels))
            engine.step()

"""The GPT of the examples, smaller, on the text of the standard library."""

from __future__ import annotations

from typing import Any

import torch
from gpt import GPT, Windows, stdlib_bytes

import elastic


def train(config: dict[str, Any]) -> None:
    """Tied embeddings, clipped gradients."""
    torch.manual_seed(0)
    model = GPT(width=32, layers=1, heads=2, context=24, dropout=0.0)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.1),
        training_data=Windows(stdlib_bytes()[: 1 << 18], 24),
        config={
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 1.0,
        },
    )
    for windows in loader:
        engine.backward(engine(windows))
        engine.step()

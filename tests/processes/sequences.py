"""Training functions over sequences that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cells
import crew
import optimizers
import torch
import trainings
from sequence_model import Transformer, logits_of, loss_of, texts

import elastic


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Transformer(config.get("dropout", 0.0))
    optimizer = optimizers.of(config, model.parameters(), lr=0.02)
    found = texts(37, crew.indices)

    def share(reader: int, readers: int) -> Iterator[Any]:
        return (found[index] for index in range(reader, len(found), readers))

    data = elastic.data.stream(share) if config.get("streamed") else found
    engine, _, loader, _ = elastic.initialize(
        model=model, training_data=data, optimizer=optimizer, **trainings.of_engine(config, optimizer)
    )
    return engine, loader


def train(config: dict[str, Any]) -> None:
    cells.begun()
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    abandoned, draws = 0, list[float]()
    for _ in elastic.epochs():
        for tokens, labels in loader:
            last = engine.is_gradient_accumulation_boundary()
            with cells.step_of(config):
                cells.come_to(config, "forward", last)
                logits = logits_of(engine, tokens)
                # Of the pass's random stream, after its dropout.
                draws.append(float(torch.rand(())))
                cells.come_to(config, "mean", last)
                loss = loss_of(logits, labels)
                cells.come_to(config, "backward", last)
                engine.backward(loss)
                engine.step()
            abandoned += elastic.get_context().abandoned
    cells.told(draws=draws, abandoned=abandoned)


def holds_the_group(config: dict[str, Any]) -> None:
    """As code from elsewhere that takes a process group."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    assert elastic.sequence.group() is not None
    train(config)

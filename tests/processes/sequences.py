"""Training functions over sequences that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import crew
import torch
import trainings
from sequence_model import Texts, Transformer, logits_of, loss_of

import elastic


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Transformer(config.get("dropout", 0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    texts = Texts(37, crew.indices)

    def share(reader: int, readers: int) -> Iterator[Any]:
        return (texts[index] for index in range(reader, len(texts), readers))

    data = elastic.data.stream(share) if config.get("streamed") else texts
    engine, _, loader, _ = elastic.initialize(
        model=model, training_data=data, optimizer=optimizer, **trainings.of_engine(config, optimizer)
    )
    return engine, loader


def train(config: dict[str, Any]) -> None:
    """Rank `config["victim"]` of a world of 4 stays at `config["where"]` in step `config["at"]`, for ever."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    abandoned, draws = 0, list[float]()
    for _ in elastic.epochs():
        for whole in loader:
            context = elastic.get_context()
            last = engine.is_gradient_accumulation_boundary()
            at_fault = config.get("at") == context.step and context.world_size == 4 and last

            def come_to(where: str, at_fault: bool = at_fault, rank: int = context.rank) -> None:
                if at_fault and config["where"] == where:
                    crew.point("there")
                    if rank == config["victim"]:
                        crew.stay()

            tokens, labels = whole
            with elastic.step() if config.get("strict") else nullcontext():
                come_to("forward")
                logits = logits_of(engine, tokens)
                # Of the pass's random stream, after its dropout.
                draws.append(float(torch.rand(())))
                come_to("mean")
                loss = loss_of(logits, labels)
                come_to("backward")
                engine.backward(loss)
                engine.step()
            abandoned += elastic.get_context().abandoned
    crew.told.update(
        draws=draws,
        starts=elastic.state["starts"],
        abandoned=abandoned,
        coordinates=dict(elastic.get_context().coordinates),
    )


def holds_the_group(config: dict[str, Any]) -> None:
    """As code from elsewhere that takes a process group."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    assert elastic.sequence.group() is not None
    train(config)

"""Training functions whose model is compiled, in the ways that people do it."""

from __future__ import annotations

from typing import Any

import crew
import torch
import trainings
from torch import nn

import elastic

# Graphs that torch has compiled in this process.
graphs: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    graphs.append(len(inputs))
    return aot_eager(graph, inputs)


def train(config: dict[str, Any]) -> None:
    """`config["by"]`: "wrapped" (torch.compile(model)), "in place" (model.compile()), "engine" (engine.compile()),
    "part" (a submodule), or "nothing"."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    torch.manual_seed(5)
    model: Any = trainings.Small(config.get("dropout", 0.0))
    by = config["by"]
    if by == "wrapped":
        model = torch.compile(model, backend=counting)
    elif by == "in place":
        model.compile(backend=counting)
    elif by == "part":
        model.first = torch.compile(model.first, backend=counting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=trainings.Numbers(37, torch.float32),
        optimizer=optimizer,
        **trainings.of_engine(config, optimizer),
    )
    if by == "engine":
        engine.compile(backend=counting)
    crew.told["starts"] = 1
    seen: dict[int, int] = {}
    for _ in elastic.epochs():
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            seen[elastic.get_context().generation] = len(graphs)
    crew.told["graphs"] = seen

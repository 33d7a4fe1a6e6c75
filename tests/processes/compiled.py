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


def by(way: str, model: Any, blocks: nn.ModuleList) -> None:
    """In place or by torch.compile: each block, each one's parts, the model, or what the experts compute."""
    for place, block in enumerate(blocks):
        if way == "blocks":
            block.compile(backend=counting)
        elif way == "wrapped blocks":
            blocks[place] = torch.compile(block, backend=counting)
        elif way == "attention":
            block.self_attn.compile(backend=counting)
            block.mlp.gate = torch.compile(block.mlp.gate, backend=counting)
        elif way == "rows":
            block.mlp.experts.forward = torch.compile(block.mlp.experts.forward, backend=counting)
    if way == "model":
        model.compile(backend=counting)
    elif way == "wrapped":
        model.model = torch.compile(model.model, backend=counting)


def count() -> None:
    """How many graphs there are in the present generation so far."""
    seen: list[int] = crew.told.setdefault("compiled", {}).setdefault(elastic.get_context().generation, [])
    seen.append(len(graphs))


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
    crew.told["starts"], crew.told["ahead"] = 1, len(graphs)
    seen: dict[int, int] = {}
    for _ in elastic.epochs():
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            seen[elastic.get_context().generation] = len(graphs)
    crew.told["graphs"] = seen

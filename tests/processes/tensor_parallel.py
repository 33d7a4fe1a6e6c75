"""Training functions over layers that ranks share."""

from __future__ import annotations

import math
from typing import Any

import crew
import torch
import trainings
from layered_model import LAYERS, Texts, Transformer, loss_of

import elastic


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3 + elastic.get_context().coordinates.get(config.get("seeded by", ""), 0))
    model = Transformer(config.get("dropout", 0.0), config.get("normed", False))
    if config.get("dtype") == "fp16":
        trainings.believe_in_half_precision()
    native = trainings.deepspeed_config(config)
    if config.get("layers", True):
        native["tensor_parallel"] = {"partition_config": LAYERS, **config.get("tensor_parallel", {})}
    if config.get("added up"):
        spec = {"patterns": [r".*\.q_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
        specs = [*LAYERS["layer_specs"], spec]
        native["tensor_parallel"] = {"partition_config": {**LAYERS, "layer_specs": specs}}
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=Texts(config.get("size", 37), crew.indices),
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02),
        config=native,
    )
    return engine, loader


def spoil_gradient(engine: Any) -> None:
    """Of one layer's slices, on the ranks that have the second ones: none of the first sees it in its own gradients."""
    if elastic.get_context().coordinates["tp"] == 1:
        weight = engine.module.layers[1].mlp.up_proj.weight
        handle = weight.register_hook(lambda gradient: handle.remove() or gradient * math.nan)


def drift(engine: Any) -> None:
    with torch.no_grad():
        engine.module.layers[0].mlp.up_proj.weight.add_(1.0)


def train(config: dict[str, Any]) -> None:
    """The ranks in `config["victims"]` stay in step `config["at"]`, for ever."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    for _ in elastic.epochs():
        for tokens, labels in loader:
            context = elastic.get_context()
            loss = loss_of(engine(tokens), labels)
            if config.get("at") == context.step and engine.is_gradient_accumulation_boundary():
                crew.point("there")
                if context.rank in config["victims"]:
                    crew.stay()
            if config.get("nan at") == context.step:
                spoil_gradient(engine)
            engine.backward(loss)
            if config.get("drift at") == context.step and context.rank == config["victim"]:
                drift(engine)
            engine.step()
    crew.told.update(
        starts=elastic.state["starts"],
        passes=float(engine.module.passes),
        mesh=dict(elastic.get_context().mesh),
        coordinates=dict(elastic.get_context().coordinates),
        weights={name: value.detach().clone() for name, value in engine.module.named_parameters()},
    )

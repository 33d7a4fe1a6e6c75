"""Training functions over DeepSpeed's own layers of experts."""

from __future__ import annotations

from typing import Any

import crew
import torch
import trainings
from layered_model import texts
from moe_model import EPS, EXPERTS, Mixture, groups_of, loss
from optimizers import is_muon_of_deepspeed

import elastic


def configured(config: dict[str, Any]) -> dict[str, Any]:
    return {**trainings.deepspeed_config(config), **config.get("native", {})}


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    context = elastic.get_context()
    model = Mixture(**config.get("model", {}))
    if config.get("drawn", True):
        model.draw(context.coordinates["ep"] * EXPERTS // context.mesh["ep"])
    native, given = configured(config), {}
    if config.get("named optimizer"):
        native["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02, "eps": EPS, "torch_adam": True}}
    elif not is_muon_of_deepspeed(config):
        groups = groups_of(model, config.get("groups", "split"))
        given["optimizer"] = torch.optim.AdamW(groups, lr=0.02, eps=EPS)
    if config.get("own schedule"):
        given["lr_scheduler"] = torch.optim.lr_scheduler.LinearLR(given["optimizer"], 0.1, total_iters=5)
    engine, _, loader, _ = elastic.initialize(
        model=model, training_data=texts(config.get("size", 37), crew.indices), config=native,
        weights=config.get("weights"), **given,
    )  # fmt: skip
    return engine, loader


def train(config: dict[str, Any]) -> None:
    """The ranks in `config["victims"]` stay in step `config["at"]` of a world of four, for ever."""
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    for _ in elastic.epochs():
        for tokens, labels in loader:
            context = elastic.get_context()
            found = loss(engine(tokens), labels)
            here = (context.step, context.world_size) == (config.get("at"), 4)
            if here and engine.is_gradient_accumulation_boundary():
                crew.point("there")
                if context.rank in config["victims"]:
                    crew.stay()
            engine.backward(found)
            engine.step()
            if config.get("drifts after") == context.step and context.rank == config["victim"]:
                with torch.no_grad():
                    engine.module.get_parameter(config["drifts"]).add_(1.0)
    crew.told.update(
        coordinates=dict(elastic.get_context().coordinates),
        weights={name: value.detach().clone() for name, value in engine.module.named_parameters()},
    )

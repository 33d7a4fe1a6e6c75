"""A training function over experts that ranks share with FSDP2."""

from __future__ import annotations

from typing import Any

import cells
import compiled
import crew
import layered_model
import optimizers
import sharing_model
import torch
import trainings
from expert_model import EPS, Balance
from layered_model import EVEN
from routed_model import RoutedMixture, plan

import elastic


def written(config: dict[str, Any]) -> Any:
    """The module of the model: with sequences that ranks may share, or without."""
    return sharing_model if config.get("sequences") else layered_model


def loss_of(config: dict[str, Any], balance: Balance, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How uneven a part of the sequences spreads over the experts is no part of how uneven the whole does."""
    found: torch.Tensor = (sharing_model.loss_of if config.get("sequences") else balance.loss)(logits, labels)
    return found


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = RoutedMixture(config.get("dropout", 0.0), config.get("noise", 0.0), written(config).Transformer, **EVEN)
    model.to(getattr(torch, config.get("precision", "float32")))
    model.model.recomputed = config.get("recomputed", False)
    model.model.layers[1].mlp.experts.w2.requires_grad_(not config.get("frozen", False))
    compiled.by(config.get("compiled", "nothing"), model, model.model.layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizers.of(config, trained, lr=config.get("rate", 0.02), eps=EPS)
    given = trainings.of_engine(config, optimizer) if config.get("schedule", True) else {}
    given["config"] = {**trainings.fsdp2_options(config), "gradient_clipping": config.get("clipping", 0.3)}
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=written(config).texts(37, crew.indices),
        optimizer=optimizer,
        weights=config.get("weights"),
        tp_plan=plan(),
        **given,
    )
    return engine, loader


def train(config: dict[str, Any]) -> None:
    cells.begun()
    engine, loader = build(config)
    balance = Balance(engine.module)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    try:
        abandoned = steps(config, engine, loader, balance)
    finally:
        # Their graph would keep the groups.
        balance.begin()
    weights = {name: value.to_local().detach().clone() for name, value in engine.module.named_parameters()}
    cells.told(abandoned=abandoned, weights=weights)


def steps(config: dict[str, Any], engine: Any, loader: Any, balance: Balance) -> int:
    """How many were abandoned."""
    abandoned = 0
    for _ in elastic.epochs():
        for tokens, labels in loader:
            last = engine.is_gradient_accumulation_boundary()
            with cells.step_of(config):
                cells.come_to(config, "forward", last)
                balance.begin()
                loss = loss_of(config, balance, engine(tokens), labels)
                cells.come_to(config, "backward", last)
                engine.backward(loss)
                cells.come_to(config, "step", last)
                engine.step()
            abandoned += elastic.get_context().abandoned
            compiled.count()
    return abandoned

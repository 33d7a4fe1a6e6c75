"""A training function over experts that ranks share with FSDP2."""

from __future__ import annotations

from typing import Any

import cells
import crew
import torch
import trainings
from expert_model import EPS, Balance
from layered_model import texts
from routed_model import RoutedMixture

import elastic


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = RoutedMixture(config.get("dropout", 0.0), config.get("noise", 0.0))
    model.to(getattr(torch, config.get("precision", "float32")))
    model.model.recomputed = config.get("recomputed", False)
    model.model.layers[1].mlp.experts.w2.requires_grad_(not config.get("frozen", False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=EPS)
    given = trainings.of_engine(config, optimizer) if config.get("schedule", True) else {}
    given["config"] = {**trainings.fsdp2_options(config), "gradient_clipping": config.get("clipping", 0.3)}
    engine, _, loader, _ = elastic.initialize(
        model=model, training_data=texts(37, crew.indices), optimizer=optimizer, weights=config.get("weights"), **given
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
            cells.come_to(config, "forward", last)
            balance.begin()
            loss = balance.loss(engine(tokens), labels)
            cells.come_to(config, "backward", last)
            engine.backward(loss)
            cells.come_to(config, "step", last)
            engine.step()
            abandoned += elastic.get_context().abandoned
    return abandoned

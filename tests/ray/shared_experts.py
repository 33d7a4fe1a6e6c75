"""A training function whose experts are shared by the ranks of a cell; steered as those of `loops`."""

from __future__ import annotations

from typing import Any

import loops
import moe_model
import torch
from expert_model import AUTOEP, EPS, Balance, MixtureOfExperts
from layered_model import EVEN, LAYERS, texts
from routed_model import RoutedMixture, plan

import elastic


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    data, model = texts(config["size"]), MixtureOfExperts(0.1)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02, eps=EPS),
        # The job's mesh turns it on.
        config={
            **loops.deepspeed_config(config),
            "expert_parallel": {**AUTOEP, "enabled": None},
            "tensor_parallel": config.get("tensor_parallel", {}),
        },
    )
    balance = Balance(engine.module)
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for tokens, labels in loader:
            engine.backward(balance.loss(engine(tokens), labels))
            engine.step()


def train_layers(config: dict[str, Any]) -> None:
    """Whose other layers are shared, too."""
    train({**config, "tensor_parallel": {"partition_config": LAYERS}})


def train_routed(config: dict[str, Any]) -> None:
    """Layers that say themselves what they are, with FSDP2."""
    torch.manual_seed(3)
    data, model = texts(config["size"]), RoutedMixture(0.1, **EVEN)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02, eps=EPS)
    engine, _, loader, _ = elastic.initialize(
        model=model, training_data=data, optimizer=optimizer, tp_plan=plan(), **loops.of_engine(config, optimizer)
    )
    balance = Balance(engine.module)
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for tokens, labels in loader:
            balance.begin()
            engine.backward(balance.loss(engine(tokens), labels))
            engine.step()


def train_native(config: dict[str, Any]) -> None:
    """The same with DeepSpeed's own layers of experts."""
    data, model = texts(config["size"]), moe_model.Mixture(dropout=0.1)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=torch.optim.AdamW(moe_model.groups_of(model, "split"), lr=0.02, eps=moe_model.EPS),
        config=loops.deepspeed_config(config),
    )
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for tokens, labels in loader:
            engine.backward(moe_model.loss(engine(tokens), labels))
            engine.step()

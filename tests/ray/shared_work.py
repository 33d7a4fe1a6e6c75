"""Training functions whose ranks share the work of a cell; steered as those of `loops`."""

from __future__ import annotations

import os
from typing import Any

import layered_model
import loops
import sequence_model
import sharing_model
import torch

import elastic


def sequences(config: dict[str, Any]) -> None:
    _train(config, sequence_model.Transformer(0.1), sequence_model)


def layers(config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    if config.get("engine") == "fsdp2":
        _train(
            config, layered_model.Transformer(0.1, **layered_model.EVEN), layered_model, tp_plan=layered_model.plan()
        )
        return
    native = {**loops.deepspeed_config(config), "tensor_parallel": {"partition_config": layered_model.LAYERS}}
    _train(config, layered_model.Transformer(0.1), layered_model, config=native)


def layers_after_set_up(config: dict[str, Any]) -> None:
    """The set-up asks for its place in the mesh, too."""
    here = elastic.get_context()
    assert here.coordinates["tp"] == int(os.environ["RANK"]) % here.mesh["tp"]
    loops.set_up_while_held(config)
    layers(config)


def both(config: dict[str, Any]) -> None:
    """Sequences and layers."""
    torch.manual_seed(3)
    _train(config, sharing_model.Transformer(0.1, **layered_model.EVEN), sharing_model, tp_plan=layered_model.plan())


def _train(config: dict[str, Any], model: torch.nn.Module, module: Any, /, **more: Any) -> None:
    data = module.texts(config["size"])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    options = {**loops.of_engine(config, optimizer), **more}
    engine, _, loader, _ = elastic.initialize(model=model, training_data=data, optimizer=optimizer, **options)
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for tokens, labels in loader:
            engine.backward(module.loss_of(module.logits_of(engine, tokens), labels))
            engine.step()
        if config.get("agrees"):
            # As the mean over an evaluation is.
            torch.distributed.all_reduce(torch.ones(1))

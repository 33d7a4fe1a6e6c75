"""A training function whose layers are shared out in stages by torch's pipelining; steered as those of `loops`."""

from __future__ import annotations

from typing import Any

import layered_model
import loops
import sharing_model
import torch
from expert_model import BALANCE, EPS
from staged_model import ROW, Staged, StagedMixture, trained

import elastic


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    _train(config, Staged(0.1, tied=True), layered_model)


def sequences(config: dict[str, Any]) -> None:
    """Stages whose ranks share sequences."""
    torch.manual_seed(3)
    model = Staged(0.1, tied=True)
    sharing_model.share(model)
    _train(config, model, sharing_model)


def layers(config: dict[str, Any]) -> None:
    """Stages whose ranks share each layer."""
    torch.manual_seed(3)
    _train(config, Staged(0.1, tied=True), layered_model, tp_plan=layered_model.plan())


def experts(config: dict[str, Any]) -> None:
    """Stages whose ranks share experts."""
    torch.manual_seed(3)
    _train(config, StagedMixture(0.1, tied=True), layered_model, _balanced)


def own_forward(config: dict[str, Any]) -> None:
    """A model of transformers, which calls its layers itself, by its plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(3)
    # In fp64, since its curve is steeper: in fp32 the order of additions shows in weights to 2e-5, here to 1e-6.
    model = LlamaForCausalLM(LlamaConfig(vocab_size=layered_model.VOCABULARY, attention_dropout=0.1, **sizes)).double()
    pipeline = elastic.Pipeline(lambda outputs, labels: layered_model.loss_of(outputs.logits, labels), own_forward=True)
    _train(config, model, layered_model, pipeline=pipeline)


def _balanced(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    logits, uneven = outputs
    return layered_model.loss_of(logits, labels) + BALANCE * uneven


def _train(config: dict[str, Any], model: Any, module: Any, loss: Any = None, **more: Any) -> None:
    data = module.texts(config["size"])
    optimizer = torch.optim.AdamW(trained(model), lr=0.02, eps=EPS)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=data,
        optimizer=optimizer,
        **{
            "pipeline": elastic.Pipeline(loss or module.loss_of, layers=ROW),
            **loops.of_engine(config, optimizer),
            **more,
        },
    )
    loops.between_steps(config, data)
    for _ in elastic.epochs():
        for batches in loader:
            loops.slow_stages(config)
            engine.train_batch(batches)

"""Training functions over experts that ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import crew
import torch
import trainings
from expert_model import AUTOEP, EPS, Balance, MixtureOfExperts
from layered_model import LAYERS
from optimizers import is_muon_of_deepspeed
from routed import loss_of, written

import elastic


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3 + elastic.get_context().coordinates.get(config.get("seeded by", ""), 0))
    model = MixtureOfExperts(config.get("dropout", 0.0), written(config).Transformer)
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(not config.get("frozen", False))
    if config.get("unchosen"):
        leave_unchosen(model)
    for layer in model.model.layers if config.get("compiled") else ():
        layer.compile(backend="aot_eager")
    native = trainings.deepspeed_config(config)
    native["expert_parallel"] = {**AUTOEP, **config.get("expert_parallel", {})}
    if config.get("layers"):
        native["tensor_parallel"] = {"partition_config": LAYERS}
    given: dict[str, Any] = {}
    if config.get("named optimizer"):
        native["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02, "eps": EPS, "torch_adam": True}}
    elif not is_muon_of_deepspeed(config):
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        adam = partial(torch.optim.AdamW, lr=0.02, eps=EPS)
        given["optimizer"] = (partial(torch.optim.SGD, lr=0.2, momentum=0.9) if config.get("sgd") else adam)(trained)
    if config.get("own schedule") == "made":
        given["lr_scheduler"] = torch.optim.lr_scheduler.LinearLR(given["optimizer"])
    if config.get("own schedule") == "to be made":
        given["lr_scheduler"] = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=5)
    with groups_of(config.get("parameters of a group")):
        engine, _, loader, _ = elastic.initialize(
            model=model, training_data=written(config).texts(config.get("size", 37), crew.indices), config=native,
            weights=config.get("weights"), **given,
        )  # fmt: skip
    return engine, loader


@torch.no_grad()
def leave_unchosen(model: MixtureOfExperts) -> None:
    """The latter half of each layer's experts: no token chooses one."""
    for layer in model.model.layers:
        layer.post_attention_layernorm.bias[0] = 9.0
        layer.mlp.gate.weight[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])


@contextmanager
def groups_of(most: int | None) -> Iterator[None]:
    """Of experts, where DeepSpeed is left to it: as of a model that has many."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    before = split.__defaults__
    split.__defaults__ = before if most is None else (most,)
    try:
        yield
    finally:
        split.__defaults__ = before


def drift(engine: Any, name: str, kind: str | None = None) -> None:
    """Of the parameter, or of this kind of what torch's optimizer keeps of it."""
    found = engine.module.get_parameter(name)
    with torch.no_grad():
        (found if kind is None else engine.optimizer.state[found][kind]).add_(1.0)


def spoil(engine: Any, victim: int) -> None:
    """In the next backward pass the gradient of this rank's experts becomes NaN, nobody else's."""
    if elastic.get_context().rank == victim:
        weight = engine.module.model.layers[0].mlp.experts.w2
        handle = weight.register_hook(lambda gradient: handle.remove() or gradient * math.nan)


def train(config: dict[str, Any]) -> None:
    """The ranks in `config["victims"]` stay in step `config["at"]` of a world of four, for ever."""
    engine, loader = build(config)
    balance = Balance(engine.module)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    try:
        steps(config, engine, loader, balance)
    finally:
        # Their graph would keep the groups.
        balance.begin()
    crew.told.update(
        starts=elastic.state["starts"],
        mesh=dict(elastic.get_context().mesh),
        coordinates=dict(elastic.get_context().coordinates),
        weights={name: value.detach().clone() for name, value in engine.module.named_parameters()},
    )


def steps(config: dict[str, Any], engine: Any, loader: Any, balance: Balance) -> None:
    for _ in elastic.epochs():
        for tokens, labels in loader:
            context = elastic.get_context()
            balance.begin()
            loss = loss_of(config, balance, engine(tokens), labels)
            here = (context.step, context.world_size) == (config.get("at"), 4)
            if here and engine.is_gradient_accumulation_boundary():
                crew.point("there")
                if context.rank in config["victims"]:
                    crew.stay()
            if config.get("nan at") == context.step and engine.is_gradient_accumulation_boundary():
                spoil(engine, config["victim"])
            engine.backward(loss)
            engine.step()
            if config.get("drifts after") == context.step and context.rank == config["victim"]:
                drift(engine, config["drifts"], config.get("kind"))

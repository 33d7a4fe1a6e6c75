"""Training functions of which one rank computes wrong numbers, as a defective device would."""

from __future__ import annotations

import random
from typing import Any

import torch
from crew import point, stay, told
from torch import nn
from trainings import build, one_pass

import elastic


def train_with_a_flip(config: dict[str, Any]) -> None:
    """On rank `victim` bit `bit` of one element of the output's gradient is flipped: in every backward pass from step
    `at` on, or with `once` in a single one, the `once`-th of that step."""
    engine, loader = build(config)
    context = elastic.get_context()
    passes = {"step": -1, "number": 0}

    def flip(gradient: torch.Tensor) -> torch.Tensor | None:
        step = elastic.get_context().step
        passes["number"] = passes["number"] + 1 if passes["step"] == step else 0
        passes["step"] = step
        once = config.get("once")
        if context.rank != config["victim"] or step < config["at"]:
            return None
        if once is not None and (step, passes["number"]) != (config["at"], once):
            return None
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[0] ^= 1 << config.get("bit", 26)
        return flipped

    for _ in elastic.epochs():
        for x, y in loader:
            out = engine(x).float()
            out.register_hook(flip)
            engine.backward(nn.functional.mse_loss(out, y.float()))
            engine.step()
    told["weights"] = {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def train_on_a_flipped_weight(config: dict[str, Any]) -> None:
    """On rank `victim` a bit of a weight is flipped between two steps, in memory."""
    engine, loader = build(config)
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
            context = elastic.get_context()
            if context.rank == config["victim"] and context.step == config["at"]:
                config["at"] = -1
                with torch.no_grad():
                    engine.module.first.weight.view(torch.int32)[0, 0] ^= 1 << 28


def train_and_stay_in_an_audit(config: dict[str, Any]) -> None:
    """Rank `victim` stays before another rank's micro-batch, in the step after `at` finished ones."""
    engine, loader = build(config)
    for _ in elastic.epochs():
        for batch in loader:
            context = elastic.get_context()
            if (context.rank, context.step, engine.batch_share) == (config["victim"], config["at"], 0.0):
                point("in an audit")
                stay()
            one_pass(engine, batch)


def train_with_a_loss_of_its_own(config: dict[str, Any]) -> None:
    """What no other rank can compute again: the loss depends on `how` besides the batch and the weights."""
    engine, loader = build(config)
    rank, passes, own = elastic.get_context().rank, 0, random.Random(elastic.get_context().rank)
    for _ in elastic.epochs():
        for x, y in loader:
            passes += 1
            loss = nn.functional.mse_loss(engine(x).float(), y.float())
            factors = {
                "rank": 1.0 + rank,
                "counter": 1.0 + passes / 10,
                "generator": own.random(),
                "buffers": 1.0 + float(engine.module.passes) / 10,
            }
            engine.backward(loss * factors[config["how"]])
            engine.step()
    told["starts"] = 1


def train_on_a_stream(config: dict[str, Any]) -> None:
    from stream_trainings import stream
    from trainings import Small, deepspeed_config

    model = Small(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic.initialize(model=model, optimizer=optimizer, training_data=stream(), config=deepspeed_config(config))


def live(engine: Any, kind: str) -> torch.Tensor | None:
    """This rank's live tensor of this kind of one parameter that it has a part of."""
    found = (each.tensor for each in engine._open().fragments() if each.kind == kind and each.tensor.numel() > 2)
    return next(found, None)


def train_with_a_flip_at_rest(config: dict[str, Any]) -> None:
    """On rank `victim` a bit of a tensor of `kind` is flipped once, `when` "within" the step after `at` finished ones,
    or "between" these."""
    engine, loader = build(config)
    context = elastic.get_context()

    def flip(when: str, tensor: torch.Tensor | None) -> None:
        here = (elastic.get_context().step, when) == (config["at"], config["when"])
        if here and context.rank == config["victim"] and not told.get("flipped"):
            assert tensor is not None
            with torch.no_grad():
                tensor.view(torch.int32)[1] ^= 1 << config.get("bit", 20)
            told["flipped"] = True

    for _ in elastic.epochs():
        for x, y in loader:
            # Not after the forward pass: FSDP2 has gathered the weights then.
            tensor = live(engine, config["kind"])
            loss = nn.functional.mse_loss(engine(x).float(), y.float())
            flip("within", tensor)
            engine.backward(loss)
            engine.step()
            flip("between", live(engine, config["kind"]))
            elastic.report(rank=context.rank)


def train_with_wrong_updates(config: dict[str, Any]) -> None:
    """On rank `victim` what the optimizer's step leaves in `kind` is wrong, from the step after `at` finished ones
    on."""
    engine, loader = build(config)
    context = elastic.get_context()
    native = engine._open().native.optimizer

    def spoil(*_: Any) -> None:
        if context.rank == config["victim"] and elastic.get_context().step >= config["at"]:
            tensor = live(engine, config["kind"])
            assert tensor is not None
            with torch.no_grad():
                tensor.view(torch.int32)[1] ^= 1 << config.get("bit", 20)

    getattr(native, "optimizer", native).register_step_post_hook(spoil)
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)


def train_with_a_script_that_writes(config: dict[str, Any]) -> None:
    """The script itself changes moments between the steps, and masters within them, on all ranks alike."""
    engine, loader = build(config)
    written = -1
    for _ in elastic.epochs():
        for x, y in loader:
            weights, moments, step = live(engine, "master"), live(engine, "exp_avg"), elastic.get_context().step
            loss = nn.functional.mse_loss(engine(x).float(), y.float())
            with torch.no_grad():
                if weights is not None and step > written:
                    weights.mul_(1.0 + 2.0**-10)
                written = step
            engine.backward(loss)
            engine.step()
            with torch.no_grad():
                if moments is not None and elastic.get_context().step > step:
                    moments.mul_(0.5)

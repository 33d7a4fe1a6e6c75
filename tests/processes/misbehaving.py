"""Training functions that fail, or do what a training function must not do."""

from __future__ import annotations

from typing import Any

import crew
import torch
from torch import nn
from trainings import build, one_pass

import elastic


def evaluates_for_ever(config: dict[str, Any]) -> None:
    """After step 2 of a run that has not resumed, until the generation ends."""
    engine, loader = build(config)
    for _ in elastic.epochs():
        for x, y in loader:
            one_pass(engine, (x, y))
            if elastic.get_context().step == 2 and not elastic.get_context().resumed:
                engine.eval()
                crew.point("there")
                while True:
                    engine(x)


def keeps_the_native_engine(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    native = engine.deepspeed
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
            assert native.global_steps == engine.global_steps


def train_until_fault(config: dict[str, Any]) -> None:
    """Rank `config["victim"]` stays for ever in the middle of step `config["at"]`; all tell when they get there."""
    engine, loader = build(config)
    for _ in elastic.epochs():
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x), y)
            if engine.global_steps == config["at"]:
                crew.point("there")
                if elastic.get_context().rank == config["victim"]:
                    crew.stay()
            engine.backward(loss)
            engine.step()


def train_raises(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
            context = elastic.get_context()
            if (context.step, context.rank) == (config["at"], config["victim"]):
                raise ZeroDivisionError("the user's own mistake")


def returns_in_a_step(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    for batch in loader:
        inside = not engine.is_gradient_accumulation_boundary()
        one_pass(engine, batch)
        if elastic.get_context().step == 1 and inside:
            break


def skips_step(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    for x, y in loader:
        engine.backward(nn.functional.mse_loss(engine(x), y))


def steps_without_backward(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    for x, _ in loader:
        engine(x)
        engine.step()


def keeps_a_tensor(config: dict[str, Any]) -> None:
    build(config)
    elastic.state["weights"] = torch.zeros(3)


def initializes_twice(config: dict[str, Any]) -> None:
    build(config)
    build(config)


def exits(config: dict[str, Any]) -> None:
    raise SystemExit("enough")


def swallows_everything(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    try:
        for batch in loader:
            one_pass(engine, batch)
    except BaseException:  # noqa: BLE001 - what a careless user writes
        return


def calls_backward_twice(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    for x, y in loader:
        out = engine(x)
        engine.backward(nn.functional.mse_loss(out[:, :1], y[:, :1]), retain_graph=True)
        engine.backward(nn.functional.mse_loss(out[:, 1:], y[:, 1:]))
        engine.step()

"""Training functions that count steps or batches by themselves."""

from __future__ import annotations

import logging
from typing import Any

import crew
import torch
from trainings import Numbers, Small, deepspeed_config, one_pass

import elastic


def _without_schedule() -> tuple[Any, Any, Any, Any]:
    model = Small(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=optimizer,
        training_data=Numbers(37, torch.float32),
        config=deepspeed_config({"stage": 1, "schedule": False}),
    )
    return model, optimizer, engine, loader


def counts_by_itself(config: dict[str, Any]) -> None:
    """The learning rate of each step follows from a variable of this function, which begins with 0 or with the run's
    step, or from the latter itself."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastic").addHandler(handler)
    model, optimizer, engine, loader = _without_schedule()
    counter = elastic.get_context().step if config["by"] == "begun" else 0
    try:
        for _ in elastic.epochs():
            for batch in loader:
                step = elastic.get_context().step if config["by"] == "context" else counter
                drop = config.get("drop")
                optimizer.param_groups[0]["lr"] = 0.01 * (
                    min(1.0, (step + 1) / 5) if drop is None else 1 + (step >= drop)
                )
                before = model.second.weight.detach().clone()
                one_pass(engine, batch)
                if torch.equal(before, model.second.weight):
                    continue
                counter += 1
    finally:
        crew.told.update(warnings=said)
        logging.getLogger("elastic").removeHandler(handler)


def counts_batches(config: dict[str, Any]) -> None:
    """A loop over steps around one over the batches of each, which it takes by itself; it never ends."""
    _, optimizer, engine, loader = _without_schedule()
    batches = (batch for _ in elastic.epochs() for batch in loader)
    while True:
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (elastic.get_context().step + 1) / 5)
        for _ in range(engine.gradient_accumulation_steps()):
            one_pass(engine, next(batches))


def ends_by_itself(config: dict[str, Any]) -> None:
    """Steps by a variable of this function, which begins with 0; batches by `next`, or in a loop that is left. Its own
    last save follows."""
    _, _, engine, loader = _without_schedule()
    counter, batches = 0, (batch for _ in elastic.epochs() for batch in loader)
    while counter < config["steps"]:
        for batch in [next(batches)] if config["by"] == "next" else loader:
            last = engine.is_gradient_accumulation_boundary()
            one_pass(engine, batch)
            counter += last
            if last and counter == config["steps"]:
                break
    engine.save_checkpoint("by the script")


def saves_by_a_counter(config: dict[str, Any]) -> None:
    """As HelloDeepSpeed does, at every `config["every"]` of its own steps."""
    _, _, engine, loader = _without_schedule()
    counter = 0
    for _ in elastic.epochs():
        for batch in loader:
            last = engine.is_gradient_accumulation_boundary()
            one_pass(engine, batch)
            counter += last
            if last and counter % config["every"] == 0:
                assert engine.save_checkpoint("of its own", client_state={"counter": counter})

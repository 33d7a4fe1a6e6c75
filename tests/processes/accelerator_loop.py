"""A loop as accelerate's examples have it, with its own Accelerator or the platform's."""

from __future__ import annotations

import logging
import math
from functools import partial
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

import crew
import torch
from accelerated import EVALUATED, Rows
from torch.utils.data import DataLoader

import elastic

TRAINED, BATCH, EPOCHS = 36, 2, 3
CLIPPED_TO = 0.3
LAST = 1_000


class Decayed:
    """An average of the weights, as scripts keep one, and register it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def add(self, model: torch.nn.Module) -> None:
        for name, value in model.named_parameters():
            self.weights[name] = 0.5 * self.weights[name] + 0.5 * value.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def rises_and_falls(update: int, warmup: int, total: int) -> float:
    """As transformers' schedules: the arguments are multiplied by the number of processes."""
    return update / max(1, warmup) if update < warmup else max(0.0, (total - update) / (total - warmup))


def streamed(rows: Rows) -> Any:
    """A stream of Hugging Face's, a shard for each micro-batch of a step."""
    import datasets

    columns = {name: [rows[number][name].tolist() for number in range(len(rows))] for name in ("x", "label")}
    return datasets.Dataset.from_dict(columns).with_format("torch").to_iterable_dataset(num_shards=6)


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """In one process, without the platform."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    told: dict[str, Any] = {}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    made = {"gradient_accumulation_steps": config["accumulates"], "mixed_precision": config.get("precision")}
    _trains(Accelerator(cpu=True, **made), config, range(EPOCHS), told)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return told


def trains(config: dict[str, Any]) -> None:
    from elastic.integrations.accelerate import Accelerator

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    accelerator = Accelerator(**config.get("accelerator", {"gradient_accumulation_steps": config["accumulates"]}))
    _trains(accelerator, config, range(EPOCHS) if config.get("ranges") else None, crew.told)
    crew.told["process"] = (accelerator.process_index, accelerator.num_processes)
    accelerator.end_training()


def counts_batches(config: dict[str, Any]) -> None:
    """As the simplest examples: each batch is an update."""
    from elastic.integrations.accelerate import Accelerator

    handler = QueueHandler(SimpleQueue())
    logging.getLogger("elastic").addHandler(handler)
    accelerator = Accelerator()
    torch.manual_seed(3)
    model: Any = torch.nn.Linear(6, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train = accelerator.prepare(model, optimizer, DataLoader(Rows(TRAINED, 1), batch_size=BATCH))
    for _ in elastic.epochs(1):
        for batch in train:
            accelerator.backward(torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"]))
            if not config.get("asks") or accelerator.sync_gradients:
                optimizer.step()
            optimizer.zero_grad()
    logging.getLogger("elastic").removeHandler(handler)
    crew.told["said"] = [handler.queue.get().getMessage() for _ in range(handler.queue.qsize())]


def _trains(accelerator: Any, config: dict[str, Any], epochs: Any, told: dict[str, Any]) -> None:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(config.get("dropout", 0.0))]
    model: Any = torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))
    # As diffusers' scripts have it, which clip by the same iterator.
    used_up = filter(lambda parameter: parameter.requires_grad, model.parameters())
    optimizer: Any = torch.optim.AdamW(used_up, lr=1e-2)
    rows: Any = streamed(Rows(TRAINED, 1)) if config.get("streams") else Rows(TRAINED, 1)
    train: Any = DataLoader(rows, batch_size=BATCH, shuffle=config.get("shuffles", False))
    evaluated: Any = DataLoader(Rows(EVALUATED, 2), batch_size=BATCH)
    accumulates, processes = accelerator.gradient_accumulation_steps, accelerator.num_processes
    # Before `prepare` a DataLoader counts the batches of all processes.
    updates = EPOCHS * math.ceil(TRAINED / BATCH / processes / accumulates)
    shape = partial(rises_and_falls, warmup=2 * processes, total=updates * processes)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    crew.point("set up") if not config.get("plain") else None
    if config.get("after"):
        # Piece by piece, and with a schedule that is made with what `prepare` has given.
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        train, evaluated = accelerator.prepare(train, evaluated)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, shape))
    elif config.get("raw"):
        # Not prepared, as in older scripts: it steps with each batch.
        model, optimizer, train, evaluated = accelerator.prepare(model, optimizer, train, evaluated)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rises_and_falls, warmup=4, total=40))
    elif config.get("shuffles"):
        # The training's comes second, and shuffles.
        evaluated, train = accelerator.prepare(evaluated, train)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:
        model, optimizer, train, evaluated, schedule = accelerator.prepare(model, optimizer, train, evaluated, schedule)
    assert config.get("streams") or EPOCHS * math.ceil(len(train) / accumulates) == updates
    average = Decayed(accelerator.unwrap_model(model))
    if config.get("averages"):
        accelerator.register_for_checkpointing(average)
    completed = given = 0
    for epoch in elastic.epochs(EPOCHS) if epochs is None else epochs:
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    output = model(batch["x"])
                    told["around"] = str((output @ output.T).dtype)
                told["dtype"] = str(output.dtype)
                loss = torch.nn.functional.cross_entropy(output, batch["label"])
                seen = accelerator.gather(loss.detach()) if config.get("gathers") else loss.detach()
                _may_stay(config, model)
                accelerator.backward(loss)
                # Older scripts do not ask whether the step ends.
                if (config.get("raw") or accelerator.sync_gradients) and completed < config.get("clips", LAST):
                    clipped = used_up if config.get("clips none") else model.parameters()
                    told["norm"] = accelerator.clip_grad_norm_(clipped, CLIPPED_TO)
                counted = (given := given + 1) % config.get("updates_every", 1) == 0
                if accelerator.sync_gradients if config.get("only at ends") else counted:
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            if config.get("stops") == completed + 1 and accelerator.is_main_process:
                accelerator.set_trigger()
            if "stops" in config and accelerator.check_trigger():
                return
            if accelerator.sync_gradients:
                if config.get("gathers at ends"):
                    accelerator.gather(loss.detach())
                completed += 1
                assert torch.isfinite(seen).all()
                rates = told.setdefault("rates", {})
                rates[_step(config, completed)] = schedule.get_last_lr()[0]
                told.setdefault("norms", {})[_step(config, completed)] = float(told.get("norm", 0.0))
                if config.get("averages"):
                    average.add(accelerator.unwrap_model(model))
                if accelerator.is_main_process and completed % config.get("saves_every", LAST) == 0:
                    accelerator.save_state(f"step_{completed}")
                if completed == config.get("leaves at") or completed >= config.get("most", LAST):
                    # As transformers' scripts have it, at `max_train_steps`.
                    break
        if not config.get("evaluates", True):
            continue
        model.eval()
        lost = []
        for batch in evaluated:
            with torch.no_grad():
                output = _evaluated(accelerator, model, batch["x"], config.get("evaluates"))
                each = torch.nn.functional.cross_entropy(output, batch["label"], reduction="none")
            lost.append(accelerator.gather_for_metrics(each))
        if accelerator.is_main_process:
            told.setdefault("log", []).append((epoch, len(torch.cat(lost)), float(torch.cat(lost).mean())))
        if config.get("saves"):
            accelerator.save_state(config["saves"])
    told["completed"] = completed
    told["last epoch"] = schedule.state_dict()["last_epoch"]
    if config.get("averages"):
        told["average"] = {name: value.tolist() for name, value in average.weights.items()}
    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    told["weights"] = {name: value.tolist() for name, value in (weights or {}).items()}
    if "changes" in config and accelerator.is_main_process:
        # As scripts put an average into the model that they are to export, or make it smaller.
        exported = accelerator.unwrap_model(model)
        exported.half() if config["changes"] == "dtype" else [each.data.zero_() for each in exported.parameters()]


def _evaluated(accelerator: Any, model: Any, x: torch.Tensor, how: Any) -> Any:
    if how == "unwrapped":
        return accelerator.unwrap_model(model)(x)
    if how == "in parts":
        # As `generate` of an encoder and a decoder does.
        for part in accelerator.unwrap_model(model):
            x = part(x)
        return x
    return model(x)


def _step(config: dict[str, Any], completed: int) -> int:
    # A loop that asks for the run's step is believed to count by it.
    own = config.get("plain") or config.get("gathers at ends")
    return completed if own else elastic.get_context().step


def _may_stay(config: dict[str, Any], model: Any) -> None:
    if "at" not in config or elastic.get_context().resumed:
        return
    here = elastic.get_context()
    if (here.step, here.rank) == (config.get("at"), config.get("victim")):
        crew.point("there")
        crew.stay()

"""Training with a batch that follows the number of workers, and the same in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import crew
import torch
from convex import SAMPLES, Samples, problem
from islands import Net, decay_of, optimizer_of
from torch.nn.functional import binary_cross_entropy_with_logits

import elastic
from elastic.core.data.samples import SampleOrder

# Of four workers; two micro-batches each.
FULL, MICRO, MOST, CLIP = 48, 6, 4, 0.05


class Heard(logging.Handler):
    """What is said of rates that the script sets by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        crew.told["warned"] = record.getMessage()


def train(config: dict[str, Any]) -> None:
    """`config`: "engine", "stage", "optimizer"; "stays" is the (rank, step) that never goes on from there."""
    model = Net()
    optimizer = optimizer_of(model, config["optimizer"])
    logging.getLogger("elastic.training.user.rates").handlers = [Heard()]
    batches = {"train_batch_size": FULL, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": CLIP}
    if config.get("engine") == "fsdp2":
        batches = {"global_batch": FULL, "micro_batch": MICRO, "gradient_clipping": CLIP}
    else:
        batches |= {"zero_optimization": {"stage": config["stage"]}, **config.get("top", {})}
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=decay_of(optimizer),
        training_data=config.get("data", Samples()),
        config=batches,
    )
    for _ in elastic.epochs():
        for x, y in loader:
            context = elastic.get_context()
            if config.get("stays") == (context.rank, context.step):
                crew.point("stays")
                crew.stay()
            engine.backward(binary_cross_entropy_with_logits(engine(x), y))
            engine.step()


def expected(
    parts: Sequence[tuple[int, int]], power: float, warmup: int, optimizer: str
) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    """Losses, learning rates and positions of every step. `parts`: so many workers until so many steps are finished."""
    model, order, (x, y) = Net(), SampleOrder(SAMPLES, 0), problem()
    update = optimizer_of(model, optimizer)
    decay, position, step, factor = decay_of(update), 0, 0, (parts[0][0] / MOST) ** power
    losses, rates, positions = [], [], []
    for number, (workers, until) in enumerate(parts):
        size, begun, before, target = FULL * workers // MOST, step, factor, (workers / MOST) ** power
        while step < until:
            rising = target > before and number > 0 and step - begun < warmup
            factor = before + (target - before) * (step - begun + 1) / (warmup + 1) if rising else target
            rows = order.indices(position, position + size)
            loss = binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            update.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            rate = update.param_groups[0]["lr"]
            update.param_groups[0]["lr"] = rate * factor
            update.step()
            update.param_groups[0]["lr"] = rate
            # Those that a step's report has are after the scheduler's own step.
            decay.step()
            losses.append(float(loss.detach()))
            rates.append(update.param_groups[0]["lr"] * factor)
            positions.append((position, position + size))
            position, step = position + size, step + 1
    return losses, rates, positions

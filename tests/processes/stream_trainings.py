"""Training functions over a stream that has epochs, whose readers are of unequal length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crew
import torch
import torch.distributed as dist
from torch import nn
from trainings import Small, deepspeed_config, fsdp2_options

import elastic
from elastic.core.data.readers import Slots
from elastic.training.data.stream.reader import Reader
from elastic.training.data.stream.spec import Stream

GLOBAL_BATCH, MICRO_BATCH = 9, 2
# Documents of each reader, in each epoch: the last reader, whose micro-batches are of one, ends in step 6.
LENGTHS = (5, 9, 0, 2, 6)
STEPS_PER_EPOCH = 6


def documents(reader: int, readers: int) -> Iterator[int]:
    return (100 * reader + number for number in range(LENGTHS[reader]))


def sample(document: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, generator=torch.Generator().manual_seed(document))
    # Random augmentation: must depend on the document and its epoch alone.
    x = x + 0.01 * torch.randn(16)
    return x, torch.stack([x.sum(), x[0] * x[1], x.abs().max()])


def stream() -> Stream:
    return elastic.data.stream(documents, shuffle_window=3, transform=sample)


def oracle(epochs: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """The sum of every step, and its samples, as one process reads them that nothing happens to."""
    slots = Slots(GLOBAL_BATCH, MICRO_BATCH)
    readers = [Reader(stream().parts, seed, number, slots.readers) for number in range(slots.readers)]
    sums, sizes = [], []
    for epoch in range(epochs):
        while taken := [(reader, len(reader.take(slots.size(reader.number), epoch))) for reader in readers]:
            if not any(size for _, size in taken):
                break
            sums.append(sum(reader.sum for reader, size in taken if size) % 2**64)
            sizes.append(sum(size for _, size in taken))
    return sums, sizes


def train(config: dict[str, Any]) -> None:
    """Rank `config["victim"]` stays in step `config["at"]` of a world of four for ever."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    model = Small(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if config.get("engine", "deepspeed") == "deepspeed":
        batch = {"train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": MICRO_BATCH}
        of_engine: dict[str, Any] = {"config": {**deepspeed_config(config), **batch}}
    else:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        options = {**fsdp2_options(config), "global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
        of_engine = {"config": options, "lr_scheduler": schedule}
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=stream(),
        optimizer=optimizer,
        num_workers=config.get("num_workers", 0),
        **of_engine,
    )
    elastic.state["starts"] = crew.told["starts"] = elastic.state.get("starts", 0) + 1
    for epoch in elastic.epochs():
        for x, y in loader:
            context = elastic.get_context()
            for name in ("forward", "backward", "step"):
                if (context.step, context.world_size, name) == (config.get("at"), 4, config.get("where")):
                    crew.point("there")
                    if context.rank == config["victim"]:
                        crew.stay()
                if name == "forward":
                    loss = nn.functional.mse_loss(engine(x), y)
                elif name == "backward":
                    engine.backward(loss)
                else:
                    engine.step()
            elastic.report(epoch=epoch)
        if config.get("after"):
            with elastic.step():
                context = elastic.get_context()
                if (context.step, context.world_size, "after") == (config.get("at"), 4, config.get("where")):
                    crew.point("there")
                    if context.rank == config["victim"]:
                        crew.stay()
                dist.all_reduce(torch.ones(1))
            if elastic.get_context().abandoned:
                continue
            crew.told.setdefault("after", []).append(elastic.get_context().step)
        elastic.state["epochs"] = [*elastic.state.get("epochs", ()), epoch]
    crew.told.update(epochs=elastic.state["epochs"])

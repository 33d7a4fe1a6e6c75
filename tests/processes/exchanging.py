"""A training function with messages of its own, in a step whose forward pass has failed."""

from __future__ import annotations

from typing import Any

import crew
import torch
import torch.distributed as dist
from torch import nn
from trainings import build


def trains(config: dict[str, Any]) -> None:
    """`survivors`: these exchange a message once the pass of a step is abandoned; `victim` stays before its own."""
    import elastic

    engine, loader = build(config)
    for x, y in loader:
        context = elastic.get_context()
        if (context.step, context.rank) == (config.get("at"), config["victim"]) and not context.resumed:
            crew.point("there")
            crew.stay()
        loss = nn.functional.mse_loss(engine(x), y)
        if engine.abandoned and "arrived" not in crew.told:
            crew.told["arrived"] = _exchanged(config["survivors"], context.rank)
        engine.backward(loss)
        engine.step()


def _exchanged(survivors: tuple[int, int], rank: int) -> bool:
    message = torch.full((1,), float(rank))
    try:
        if rank == survivors[0]:
            dist.send(message, survivors[1])
        else:
            dist.recv(message, survivors[0])
    except RuntimeError:
        return False
    return True

"""Training functions with messages of their own, in a step whose forward pass has failed, and without any."""

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


def gathers_at_once(config: dict[str, Any]) -> None:
    """Passes without gradients, counted by their gathers, one by one and within `engine.gathered()`; between two
    steps, as in an evaluation."""
    engine, loader = build(config)
    calls: list[str] = []
    engine.watch_collectives(lambda call: calls.append(call.op))
    told = crew.told.setdefault("gathers", [])
    for x, y in loader:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        engine.eval()
        with torch.no_grad():
            calls.clear()
            plain = [engine.module(x) for _ in range(3)]
            apart = len(calls)
            with engine.gathered():
                calls.clear()
                whole = [engine.module(x) for _ in range(3)]
                within = len(calls)
            calls.clear()
            engine.module(x)
            told.append((apart, within, len(calls)))
        assert all(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))
        engine.train()

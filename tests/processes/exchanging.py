"""Training functions with messages of their own, in a step whose forward pass has failed, and without any."""

from __future__ import annotations

from typing import Any

import crew
import torch
import torch.distributed as dist
from torch import nn
from trainings import build, of_engine

WIDTH = 8


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


class Layers(nn.Module):
    """Each of which is sharded, and gathered, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def gathers_at_once(config: dict[str, Any]) -> None:
    """Passes without gradients, counted by their gathers: as ever, within `engine.gathered()`, and as ever again;
    between two steps, as in an evaluation."""
    import elastic

    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = list(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)))
    given = of_engine(config, optimizer)
    engine, _, loader, _ = elastic.initialize(model=model, optimizer=optimizer, training_data=data, **given)
    calls: list[str] = []
    engine.watch_collectives(lambda call: calls.append(call.op))

    def passes(x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        calls.clear()
        found = [engine.module(x) for _ in range(3)]
        return len(calls), found

    for x in loader:
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.eval()
        with torch.no_grad():
            apart, plain = passes(x)
            with engine.gathered():
                within, whole = passes(x)
            after, _ = passes(x)
        crew.told.setdefault("gathers", []).append((apart, within, after))
        assert all(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))
        engine.train()

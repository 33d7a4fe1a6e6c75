"""Training of ranks that share one device, over gloo: NCCL refuses two ranks on one."""

from __future__ import annotations

import os
from typing import Any

import torch


def share() -> None:
    """Called by each process first, since DeepSpeed chooses its accelerator once."""
    on_device = torch.cuda.is_available()
    os.environ["DS_ACCELERATOR"] = "cuda" if on_device else "cpu"
    from elastic.engines.deepspeed.kind import KIND

    device = torch.device("cuda", 0) if on_device else torch.device("cpu")
    type(KIND).device = lambda self, local_rank: ("gloo", device)  # type: ignore[method-assign]


def train(config: dict[str, Any]) -> None:
    """Rank `config["victim"]` stays in step `config["at"]` of its first generation for ever."""
    import crew
    from torch import nn
    from trainings import build

    import elastic

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    engine, loader = build(config)
    victims = {config["victim"]} if "victim" in config else set()
    abandoned = 0
    for _ in elastic.epochs():
        for x, y in loader:
            context = elastic.get_context()
            if victims and context.step == config["at"] and engine.is_gradient_accumulation_boundary():
                crew.point("there")
                if context.rank in victims:
                    crew.stay()
                victims.clear()
            loss = nn.functional.mse_loss(engine(x.to(engine.device)).float(), y.to(engine.device).float())
            engine.backward(loss)
            engine.step()
            abandoned += elastic.get_context().abandoned
            elastic.report(rank=context.rank)
    crew.told.update(abandoned=abandoned, device=str(engine.device), starts=1)

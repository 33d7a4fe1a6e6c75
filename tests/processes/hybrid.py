"""A training function over copies of shards (`fsdp2: {shard_workers: N}`), of which one drifts apart."""

from __future__ import annotations

from typing import Any

import torch
import trainings
from torch.distributed.tensor import DTensor

import elastic


def train(config: dict[str, Any]) -> None:
    engine, loader = trainings.build(config)
    for _ in elastic.epochs():
        for batch in loader:
            context = elastic.get_context()
            trainings.one_pass(engine, batch)
            if config["drifts after"] == context.step and context.rank == config["victim"]:
                drift(engine, config["drifts"])


def drift(engine: Any, what: str) -> None:
    """This rank's copy of a parameter's shard, or of what the optimizer keeps of it ("exp_avg/NAME", "step/NAME")."""
    kind, name = what.split("/")
    parameter: Any = dict(engine.module.named_parameters())[name]
    with torch.no_grad():
        kept = parameter if kind == "master" else engine.optimizer.state[parameter][kind]
        (kept.to_local() if isinstance(kept, DTensor) else kept).mul_(1.1)

"""Training functions in which one node computes wrong gradients, or has a faulty memory, from some step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loops
import ray
import torch
from torch import nn

import elastic


def train(config: dict[str, Any]) -> None:
    """The file `wrong` in the shared folder names the node, and the step after which it begins."""
    engine, loader, _ = loops.build(config)
    node, told = ray.get_runtime_context().get_node_id(), Path(config["folder"]) / "wrong"

    def flip(gradient: torch.Tensor) -> torch.Tensor | None:
        wrong, _, after = (told.read_text() if told.exists() else "").partition(" ")
        if wrong != node or elastic.get_context().step < int(after):
            return None
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[0] ^= 1 << 26
        return flipped

    for _ in elastic.epochs():
        for x, y in loader:
            out = engine(x)
            out.register_hook(flip)
            engine.backward(nn.functional.mse_loss(out, y))
            engine.step()


def train_in_faulty_memory(config: dict[str, Any]) -> None:
    """As above; the file names the kind of tensor, too. A bit of one flips in each step from there on."""
    engine, loader, _ = loops.build(config)
    node, told = ray.get_runtime_context().get_node_id(), Path(config["folder"]) / "wrong"
    flipped = (0, -1)
    for _ in elastic.epochs():
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x), y)
            wrong, after, kind = (told.read_text() if told.exists() else "  ").split(" ")
            now = elastic.get_context()
            if wrong == node and now.step >= int(after) and (now.generation, now.step) != flipped:
                # Twice would be back.
                flipped = (now.generation, now.step)
                live = next(each.tensor for each in engine._open().fragments() if each.kind == kind)
                live.view(torch.int32)[0] ^= 1 << 20
            engine.backward(loss)
            engine.step()

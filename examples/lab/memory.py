"""Bytes that a DeepSpeed engine holds on its rank, counted on its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MOMENTS = ("exp_avg", "exp_avg_sq")


def held_bytes(engine: Any, stage: int) -> dict[str, int]:
    """By part, as `elastic.planner.states.StateBytes` names them. Call it between a backward pass and its step."""
    optimizer = engine.optimizer
    return {
        "weights": weight_bytes(engine, stage),
        "master": storages(master(optimizer)),
        "moments": moment_bytes(optimizer),
        "gradients": gradient_bytes(engine, stage),
    }


def weight_bytes(engine: Any, stage: int) -> int:
    parameters = list(engine.module.parameters())
    return storages([p.ds_tensor for p in parameters] if stage == 3 else parameters)


def master(optimizer: Any) -> list[Any]:
    """The copies of the weights that the optimizer updates, where there are any."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [tensor for group in getattr(optimizer, "fp32_groups", []) for tensor in group]


def moment_bytes(optimizer: Any) -> int:
    """Adam's two, from its first step on."""
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return storages(state[name] for state in states for name in _MOMENTS)


def gradient_bytes(engine: Any, stage: int) -> int:
    """What is kept of the gradients from one micro-batch of a step to the next."""
    if stage < 2:
        return storages(p.grad for p in engine.module.parameters())
    # Views of whole gradients on the CPU: their elements count.
    kept = [g for group in engine.optimizer.averaged_gradients.values() for g in group]
    return sum(g.numel() * g.element_size() for g in kept if g is not None)


def storages(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind them, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(size for address, size in found.items() if address)

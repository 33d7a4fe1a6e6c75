"""The gradient of sharded parameters: its exact norm over all ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.meshes import over_cell


def require_none(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError, naming a parameter, where one has a gradient before the first backward pass of an engine."""
    found = next((name for name, parameter in parameters.items() if parameter.grad is not None), None)
    if found is not None:
        raise UsageError(
            f"parameter {found!r} has a gradient before engine.backward: a loss that calls backward itself "
            "(torchtitan's ChunkedLossWrapper) is not scaled to the mean over the step; use one that engine.backward "
            "differentiates (its CrossEntropyLoss, torch's cross_entropy)"
        )


def local_gradients(parameters: Iterable[torch.Tensor], tp: int = 1, copies: int = 1) -> list[tuple[torch.Tensor, int]]:
    """This rank's shards of the gradients, of parameters that have one, and how many ranks have the same shard: the
    `copies` of each, and the `tp` of a cell, of a parameter that its plan has not cut."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            found.append(
                (shard_of(parameter.grad), copies * (tp if isinstance(over_cell(parameter), Replicate) else 1))
            )
    return found


def shard_of(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank has of a reduced gradient."""
    local: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local


def total_norm(
    gradients: list[tuple[torch.Tensor, int]],
    device: torch.device,
    group: dist.ProcessGroup | None,
    all_reduce: Callable[..., Any] = dist.all_reduce,
) -> torch.Tensor:
    """The L2 norm over the shards of all ranks: a 0-d fp64 tensor, bitwise the same on every rank; inf or NaN where any
    element is non-finite. Collective over `group`, without waiting for the device.

    Not `clip_grad_norm_`, which sums in the gradients' own precision, gives a DTensor, and refuses parameters of two
    meshes.
    """
    parts = [gradient.double().square().sum() / copies for gradient, copies in gradients if gradient.numel()]
    total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
    total = total.to(device)
    all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def clip(gradients: list[torch.Tensor], norm: torch.Tensor, largest: float) -> None:
    """As torch's clip_grad_norm_: multiplied by largest / (norm + 1e-6) where that is below 1."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))

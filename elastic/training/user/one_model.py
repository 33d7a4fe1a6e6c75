"""Before a model is sharded over the ranks of a cell: do they have the same one?

DeepSpeed broadcasts weights among the ranks with the same slices, or experts, only (0.19.8, runtime/engine.py:2038).
Ranks that share layers or experts and were seeded differently, or of which one alone loaded pretrained weights, would
train slices of different models, and nothing would say so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastic.comm.agreement import Agreement
from elastic.core.errors import UsageError
from elastic.training.state.verification import listed
from elastic.training.state.verify_weights import MASK63, fingerprints


def require_one_model(model: torch.nn.Module, cell: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raises UsageError on all ranks where the models within any cell differ; `cell` is that of this rank. Collective
    over all ranks."""
    assert cell is not None
    assert dist.group.WORLD is not None
    error: Exception | None = None
    try:
        _compare(model, Agreement(cell, device))
    except UsageError as found:
        error = found
    Agreement(dist.group.WORLD, device).raise_together(error, "comparing the model with those of its cell")


def is_in_parts(model: torch.nn.Module) -> bool:
    """Has each rank built a part of the model already? DeepSpeed and Megatron mark parameters that not all ranks have.
    Nothing will be cut, and the engine sends each part's values to all that have it, as it does without a mesh."""
    return any(getattr(parameter, "allreduce", True) is False for parameter in model.parameters())


def _compare(model: torch.nn.Module, agreement: Agreement) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    described = repr([(name, tuple(tensor.shape), tensor.is_meta) for name, tensor in tensors.items()])
    names = fingerprints([torch.tensor(list(described.encode()))])[0]
    _, (unlike,) = agreement.any_and_unequal([], [names & MASK63])
    if unlike:
        raise UsageError(
            f"{_RANKS} have built models with other parameters: the training function must build the same model on "
            "every rank"
        )
    if any(tensor.is_meta for tensor in tensors.values()):
        # Without values, on all ranks: the engine says what to do.
        return
    _, differing = agreement.any_and_unequal([], fingerprints(list(tensors.values())))
    found = [name for name, flag in zip(tensors, differing, strict=True) if flag]
    if found:
        raise UsageError(
            f"{_RANKS} have different values of {listed(found)}: build the model from one seed and load the same "
            "weights on every rank, before elastic.initialize"
        )


_RANKS = "the ranks that share layers or experts"

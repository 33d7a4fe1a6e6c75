"""A Trainer whose workers share sequences (`mesh: {sp: N}`): each computes with its part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from elastic import sequence
from elastic.core.errors import UsageError
from elastic.integrations import sequences

_LABELS = "labels"
# What fills up a length that workers cannot share evenly: nobody attends to it, and its loss does not count.
_FILLED = {"attention_mask": 0, _LABELS: -100}


def shares(trainer: Any, sp: int) -> bool:
    """Can the model of this Trainer be called with parts of sequences? Raises UsageError where it can, and another loss
    than the model's is asked for."""
    config = getattr(trainer.model, "config", None)
    if sp == 1 or getattr(config, "_attn_implementation", None) != sequences.NAME:
        return False
    asked = {"compute_loss_func": trainer.compute_loss_func, "label_smoothing_factor": trainer.label_smoother}
    for name, value in asked.items():
        if value is not None:
            raise UsageError(
                f"elastic.integrations.transformers.Trainer: {name} is of whole sequences, which no worker has with "
                f"mesh: {{sp: {sp}}}; override compute_loss (elastic.integrations.sequences), or leave it out"
            )
    return True


def loss(model: Any, inputs: Mapping[str, Any], whole: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss of a causal language model over the tokens of a batch, and with `whole` its logits, of all parts.

    Raises UsageError for inputs without labels, and for those that `sequences.part` does not know."""
    if _LABELS not in inputs:
        raise UsageError(
            "elastic.integrations.transformers.Trainer: where workers share sequences the loss is that of the labels, "
            "and a batch has none; the data collator is to give them"
        )
    length = inputs[_LABELS].shape[1]
    filled = {name: _filled(name, value, -length % sequence.size()) for name, value in inputs.items()}
    labels = filled.pop(_LABELS)
    outputs = model(**sequences.part(**filled))
    found = sequences.loss(outputs.logits, labels)
    return found, {"logits": sequence.gather(outputs.logits)[:, :length]} if whole else {}


def _filled(name: str, value: torch.Tensor, missing: int) -> torch.Tensor:
    """[batch, length, ...], longer by `missing` places on the right."""
    if not missing:
        return value
    if name == "position_ids":
        more = torch.arange(1, missing + 1, device=value.device) + value[:, -1:]
        return torch.cat([value, more], 1)
    return pad(value, (*(0 for _ in range(2 * (value.dim() - 2))), 0, missing), value=_FILLED.get(name, 0))

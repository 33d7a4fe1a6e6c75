"""What a Trainer knows of its run, as it is kept in snapshots, and taken up where a run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

_LOGS_KEPT = 1000


def kept(trainer: Any) -> dict[str, Any]:
    state = trainer.state
    return {
        "log_history": [_finite(entry) for entry in state.log_history[-_LOGS_KEPT:]],
        "best_metric": state.best_metric,
        "best_global_step": state.best_global_step,
        "total_flos": state.total_flos,
        "callbacks": _callbacks(trainer),
        "loss": number(trainer._tr_loss.item()),
        "loss_total": number(trainer._total_loss_scalar),
        "logged": trainer._globalstep_last_logged,
        "first": trainer._initial_global_step,
        "seconds": trainer._seconds,
    }


def take_up(trainer: Any, found: Mapping[str, Any]) -> None:
    """`found`: what was kept, nothing at a run's beginning. The Trainer has the run's step already."""
    state = trainer.state
    state.log_history = list(found.get("log_history", ()))
    state.best_metric = found.get("best_metric")
    state.best_global_step = found.get("best_global_step")
    state.total_flos = found.get("total_flos", 0)
    _restore_callbacks(trainer, found.get("callbacks", {}))
    # The losses since the last line of the log, of all ranks, and of the lines before.
    trainer._tr_loss = _sum(found.get("loss", 0.0), trainer.args.device)
    trainer._total_loss_scalar = found.get("loss_total", 0.0)
    trainer._globalstep_last_logged = found.get("logged", state.global_step)
    trainer._initial_global_step = found.get("first", state.global_step)
    trainer._seconds = found.get("seconds", 0.0)
    trainer._began = time.time() - trainer._seconds


def take_first_ranks_log(state: Any, lines: int) -> None:
    """Of an evaluation each rank has logged its own times, after the first `lines` entries: what is kept of a step is
    the same on all ranks. Collective where there was one."""
    if any(key.endswith("_runtime") for entry in state.log_history[lines:] for key in entry):
        of_first = [state.log_history[lines:]]
        torch.distributed.broadcast_object_list(of_first, src=0)
        state.log_history[lines:] = of_first[0]


def _sum(value: float | None, device: torch.device) -> torch.Tensor:
    """Of losses; a kept one that was not finite is None."""
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64, device=device)


def _callbacks(trainer: Any) -> dict[str, Any]:
    """The state of callbacks that have one, as TrainerState keeps it."""
    # Not at the top: `transformers` says what is missing where it is not installed.
    from transformers.trainer_callback import ExportableState

    found: dict[str, Any] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            name, said = type(callback).__name__, callback.state()
            if name in found:
                found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), said]
            else:
                found[name] = said
    return found


def _restore_callbacks(trainer: Any, kept: dict[str, Any]) -> None:
    """In place: transformers' own way makes new objects, which the user's code does not hold."""
    for name, said in kept.items():
        same = [callback for callback in trainer.callback_handler.callbacks if type(callback).__name__ == name]
        for callback, one in zip(same, said if isinstance(said, list) else [said], strict=False):
            for attribute, value in one.get("attributes", {}).items():
                setattr(callback, attribute, value)


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: number(value) for key, value in entry.items()}


def number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Is a step's loss, and its gradient, a number? Decided from what every rank has, so that all ranks decide alike.

No collective is added to a good step. A loss that is no number on one rank makes that rank's gradients no numbers
either (`guarded`), and DeepSpeed's reduction carries them to all. What is looked at then is the norm that DeepSpeed has
computed over all ranks; in stage 0, where each rank has the whole reduced gradient, its norm is computed here. The
ranks tell each other about their losses only where DeepSpeed was told not to compute the norm (`compute_grad_norm:
false`), and in fp16 after an overflow: a loss scale that is too high spoils gradients, but never the loss itself.

DeepSpeed 0.19.8 does not apply a step whose norm is no number (except where `check_grad_overflow` was switched off)
and reports inf; -1 stands for "not finite" where it does not look.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.core.settings import AnomalySettings
from elastic.training.result import BadStep

logger = logging.getLogger(__name__)


class AnomalyWatch:
    """Of one DeepSpeed engine, for one generation. In every step: `begin`, `guarded` for every loss, `stepping` around
    the optimizer's step, `found`, and `undo` for what was found.

    Raises UsageError where the policy is to skip and the configuration does not allow it.
    """

    def __init__(self, engine: Any, settings: AnomalySettings) -> None:
        self.policy = settings.policy
        self._engine = engine
        self._max_overflows = settings.max_overflows
        self._scaler = _scaler(engine)
        self._autocast = getattr(engine, "torch_autocast_z0_gradscaler", None) is not None
        # Stage 0 in fp32: torch's own optimizer, which knows no norm.
        self._whole_gradient = not hasattr(engine.optimizer, "_global_grad_norm") and not self._autocast
        self._norm: float | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._overflows = 0
        if self._autocast:
            logger.warning("steps under torch's gradient scaler are not watched for losses and gradients of no number")
        if settings.policy == "skip":
            _require_skipping(engine, self._autocast)
        if hasattr(self._scaler, "raise_error_at_min_scale"):
            # DeepSpeed would raise a plain Exception at the first one: here `max_overflows` decides.
            self._scaler.raise_error_at_min_scale = False

    def begin(self) -> None:
        """Before a step's first forward pass, which may change buffers (the statistics of a batch norm): a step that is
        skipped leaves them as they were."""
        if self.policy == "skip":
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._engine.module.buffers()]

    def undo(self) -> bool:
        """Skip the step that was found to be bad. False where DeepSpeed has applied it in spite of everything."""
        if self.policy != "skip" or self._engine.was_step_applied():
            return False
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        return True

    def guarded(self, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """loss * scale; where the loss is no number, its gradient is none either, whatever it was made of.

        Nothing is waited for: on a device this is enqueued like everything else.
        """
        wrong = torch.isfinite(loss.detach()).logical_not()
        # In the loss's own type: multiplying by one is exact.
        return loss * scale * torch.ones_like(loss, requires_grad=False).masked_fill_(wrong, math.nan)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around DeepSpeed's step at the end of a global batch: a gradient that is no number is not applied."""
        if not self._whole_gradient:
            yield
            return
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        self._norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if math.isfinite(self._norm):
            yield
        else:
            with _withheld(self._engine.optimizer):
                yield

    @property
    def grad_norm(self) -> float | None:
        """The gradient's norm, the same on every rank; None where DeepSpeed was told not to compute it."""
        norm = self._norm if self._whole_gradient else self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def found(self, own_loss: float) -> BadStep | None:
        """After `stepping`: what was wrong with the step. None on all ranks or on none; each says what it knows."""
        if self._autocast:
            return None
        norm = self.grad_norm
        wrong = self._told(own_loss) if norm is None else not math.isfinite(norm) or norm < 0.0
        if self._scaler is not None:
            # The same on every rank, since all skip or none.
            overflow = wrong or not self._engine.was_step_applied()
            if overflow and self._told(own_loss):
                return _bad_loss(own_loss, BadStep("loss", "not finite on another rank"))
            return self._overflowed(overflow)
        return _bad_loss(own_loss, BadStep("gradient", "not finite")) if wrong else None

    def _overflowed(self, overflow: bool) -> BadStep | None:
        """fp16: a step that overflows is skipped by DeepSpeed and lowers the scale. That is how it finds the scale."""
        self._overflows = self._overflows + 1 if overflow and _at_floor(self._scaler) else 0
        if self._overflows <= self._max_overflows:
            return None
        scale, count = self._scaler.cur_scale, self._overflows
        self._overflows = 0
        return BadStep("loss scale", f"{scale:g}, as low as it may be, and {count} steps in a row have overflowed")

    def _told(self, own_loss: float) -> bool:
        """Collective: is some rank's loss no number?"""
        from deepspeed import comm

        flag = torch.tensor([not math.isfinite(own_loss)], dtype=torch.uint8, device=self._engine.device)
        comm.all_reduce(flag, op=comm.ReduceOp.MAX, group=self._engine.seq_data_parallel_group)
        return bool(flag.item())


def _bad_loss(own_loss: float, otherwise: BadStep) -> BadStep:
    return otherwise if math.isfinite(own_loss) else BadStep("loss", str(own_loss))


@contextmanager
def _withheld(optimizer: Any) -> Iterator[None]:
    """DeepSpeed believes of torch's optimizer that it has overflowed: counters as after a skip, no scheduler step."""
    own = vars(optimizer)
    before = {name: own[name] for name in ("step", "overflow") if name in own}
    optimizer.step, optimizer.overflow = lambda *_, **__: None, True
    try:
        yield
    finally:
        for name in ("step", "overflow"):
            if name in before:
                # torch's schedulers put a counting `step` there.
                setattr(optimizer, name, before[name])
            else:
                delattr(optimizer, name)


def _require_skipping(engine: Any, autocast: bool) -> None:
    config, stage = engine._config, engine.zero_optimization_stage()
    reason = None
    if autocast:
        reason = "torch's gradient scaler decides by itself which steps are applied"
    elif not engine.zero_compute_grad_norm():
        reason = "without zero_optimization.compute_grad_norm a bad gradient is known only after the step"
    elif stage in (1, 2) and engine.bfloat16_enabled() and not config.bfloat16_config.check_grad_overflow:
        reason = "without bf16.check_grad_overflow a bad gradient is known only after the step"
    if reason is not None:
        raise UsageError(f"anomalies.policy is skip, but {reason}; change that, or choose rollback")


def _scaler(engine: Any) -> Any:
    """What holds the loss scale of an fp16 engine; None for other types."""
    if not engine.fp16_enabled():
        return None
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _at_floor(scaler: Any) -> bool:
    """A static scale cannot be lowered at all."""
    if not getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
        return True
    floor = getattr(scaler, "min_scale", getattr(scaler, "min_loss_scale", None))
    return floor is None or float(scaler.cur_scale) <= float(floor)

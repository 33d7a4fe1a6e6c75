"""Detection of steps with a non-finite loss or gradient, from values that all ranks share, so that all decide alike.

No collective is added to a good step. A non-finite loss on one rank makes that rank's gradient non-finite (`guarded`),
and the engine's reduction carries it to all ranks. Then the norm that the engine computes over all ranks is checked.
Ranks exchange whether their losses were finite only where the engine computes no norm, and in fp16 after an overflow:
a loss scale that is too high makes gradients non-finite, but never the loss itself.
"""

from __future__ import annotations

import math

import torch

from elastic.comm.agreement import Agreement
from elastic.core.settings import AnomalySettings
from elastic.engines.base import Engine, LossScale, StepOutcome
from elastic.training.result import BadStep


class AnomalyWatch:
    """Of one engine, for one generation. In every step: `begin`, `guarded` for every loss, `found` for its outcome, and
    `undo` for what was found."""

    def __init__(self, engine: Engine, settings: AnomalySettings, agreement: Agreement) -> None:
        self.policy = settings.policy
        self._module = engine.module
        self._judged = engine.judged
        self._agreement = agreement
        self._max_overflows = settings.max_overflows
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._overflows = 0

    def begin(self) -> None:
        """Before a step's first forward pass, which may change buffers (the statistics of a batch norm): a step that is
        skipped leaves them as they were."""
        if self.policy == "skip":
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]

    def undo(self, outcome: StepOutcome) -> bool:
        """Skip the step that was found to be bad. False where the engine has applied it, or the policy is another."""
        if self.policy != "skip" or outcome.applied:
            return False
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        return True

    def guarded(self, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """loss * scale. A non-finite loss is made to yield a non-finite gradient.

        Nothing is waited for: on a device this is enqueued like everything else.
        """
        wrong = torch.isfinite(loss.detach()).logical_not()
        # In the loss's own type: multiplying by one is exact.
        return loss * scale * torch.ones_like(loss, requires_grad=False).masked_fill_(wrong, math.nan)

    def found(self, own_loss: float, outcome: StepOutcome) -> BadStep | None:
        """What was wrong with the step. None on all ranks or on none; each names what it knows. May be collective."""
        if not self._judged:
            return None
        norm = None if outcome.grad_norm is None else float(outcome.grad_norm)
        wrong = self._told(own_loss) if norm is None else not math.isfinite(norm) or norm < 0.0
        if outcome.loss_scale is not None:
            # The same on every rank, since all ranks skip or none.
            overflow = wrong or not outcome.applied
            if overflow and self._told(own_loss):
                return _bad_loss(own_loss, BadStep("loss", "not finite on another rank"))
            return self._overflowed(overflow, outcome.loss_scale)
        return _bad_loss(own_loss, BadStep("gradient", "not finite")) if wrong else None

    def _overflowed(self, overflow: bool, scale: LossScale) -> BadStep | None:
        """fp16: a step that overflows is skipped by the engine and lowers the scale. That is how it finds the scale."""
        self._overflows = self._overflows + 1 if overflow and scale.at_floor else 0
        if self._overflows <= self._max_overflows:
            return None
        count, self._overflows = self._overflows, 0
        value = f"{scale.value:g}, as low as it may be, and {count} steps in a row have overflowed"
        return BadStep("loss scale", value)

    def _told(self, own_loss: float) -> bool:
        """Collective: is some rank's loss non-finite?"""
        return self._agreement.any(not math.isfinite(own_loss))


def _bad_loss(own_loss: float, otherwise: BadStep) -> BadStep:
    return otherwise if math.isfinite(own_loss) else BadStep("loss", str(own_loss))

"""A step with a non-finite gradient under DeepSpeed: known from the norm, never applied where that was asked for.

DeepSpeed 0.19.8 computes the norm over all ranks and does not apply a step whose norm is non-finite (except where
`check_grad_overflow` was switched off); it reports inf, or -1 for "not finite" where it does not compute the value. In
stage 0 in fp32 the optimizer is torch's own, which knows no norm: there each rank has the whole reduced gradient, and
the norm is computed here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.engines.base import LossScale
from elastic.engines.deepspeed.experts.placement import is_expert
from elastic.engines.deepspeed.extra_state import scaler_of
from elastic.engines.deepspeed.pipeline.module import is_pipeline
from elastic.engines.live_state import is_sliced

logger = logging.getLogger(__name__)


class NonFinite:
    """The norm and the loss scale of one engine's steps. `stepping` goes around every optimizer step.

    Raises UsageError where steps are to be skipped and the configuration does not allow it.
    """

    def __init__(self, engine: Any, policy: str) -> None:
        self._engine = engine
        self._scaler: Any = scaler_of(engine) if engine.fp16_enabled() else None
        autocast = getattr(engine, "torch_autocast_z0_gradscaler", None) is not None
        self.judged = not autocast
        self._whole_gradient = not hasattr(engine.optimizer, "_global_grad_norm") and not autocast
        self._norm: float | None = None
        if autocast:
            logger.warning("with torch's gradient scaler, steps are not watched for non-finite losses and gradients")
        if policy == "skip":
            _require_skipping(engine, autocast)
        if self._scaler is not None and hasattr(self._scaler, "raise_error_at_min_scale"):
            # DeepSpeed would raise a plain Exception at the first overflow: here `max_overflows` decides.
            self._scaler.raise_error_at_min_scale = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around DeepSpeed's step at the end of a global batch: a non-finite gradient is not applied."""
        if not self._whole_gradient:
            yield
            return
        self._norm = self._whole_norm()
        if math.isfinite(self._norm):
            yield
        else:
            with _withheld(self._engine.optimizer):
                yield

    def _whole_norm(self) -> float:
        """Of slices over the ranks that share them, of experts and of layers over those that have them; what several of
        those ranks have whole counts once."""
        gradients = {p: _values(p.grad) for p in self._engine.module.parameters() if p.grad is not None}
        if is_pipeline(self._engine.module):
            cell = self._engine.grid.get_pipe_parallel_group()
            own = [gradient for p, gradient in gradients.items() if not getattr(p, "ds_pipe_replicated", False)]
        elif self._engine.autotp_size() > 1 or self._engine.has_moe_layers:
            cell, is_part = self._sharing()
            first = dist.get_rank(cell) == 0
            own = [gradient for p, gradient in gradients.items() if first or is_part(p)]
        else:
            return float(torch.nn.utils.get_total_norm(list(gradients.values()))) if gradients else 0.0
        squared = torch.nn.utils.get_total_norm(own).double().square() if own else torch.zeros((), dtype=torch.float64)
        squared = squared.to(self._engine.device)
        dist.all_reduce(squared, group=cell)
        return float(squared.sqrt())

    def _sharing(self) -> tuple[dist.ProcessGroup, Callable[[Any], bool]]:
        """The ranks that share layers or experts, and whether a parameter is a part of what they share."""
        if self._engine.autotp_size() > 1:
            return self._engine.mpu.get_tensor_model_parallel_group(), is_sliced
        return next(iter(self._engine.expert_parallel_group.values())), is_expert

    @property
    def grad_norm(self) -> float | torch.Tensor | None:
        """The gradient's norm, the same on every rank; None where DeepSpeed was told not to compute it."""
        norm: float | torch.Tensor | None = self._norm if self._whole_gradient else self._engine.get_global_grad_norm()
        return norm

    def loss_scale(self) -> LossScale | None:
        return None if self._scaler is None else LossScale(float(self._scaler.cur_scale), _at_floor(self._scaler))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Of an embedding with sparse=True: the rows that are not zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@contextmanager
def _withheld(optimizer: Any) -> Iterator[None]:
    """Make DeepSpeed believe that torch's optimizer has overflowed: counters as after a skip, no scheduler step."""
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


def _at_floor(scaler: Any) -> bool:
    """A static scale cannot be lowered at all."""
    if not getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
        return True
    floor = getattr(scaler, "min_scale", getattr(scaler, "min_loss_scale", None))
    return floor is None or float(scaler.cur_scale) <= float(floor)

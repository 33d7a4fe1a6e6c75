"""What is measured of a step beside its time, and the report that says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from elastic.comm.device_meters import ClockMeter, EnergyMeter
from elastic.core.data.readers import MODULUS
from elastic.core.data.steps import StepReport
from elastic.engines.base import Engine, StepOutcome
from elastic.engines.flop_count import FlopCount
from elastic.engines.gradient_squares import GradientSquares
from elastic.training.result import BadStep
from elastic.training.scope import GenerationScope
from elastic.training.step_loop import StepProgress


class StepMeasures:
    """Of one rank. `open` on every generation; for each micro-batch `forward` and `backward` go around its passes, for
    each step `report` comes after it."""

    def __init__(self, device: torch.device) -> None:
        self._energy, self._clocks = EnergyMeter(device), ClockMeter(device)

    def open(self, engine: Engine, scope: GenerationScope) -> None:
        self._engine: Engine | None = engine
        self._spec = scope.spec
        self._squares = GradientSquares(scope.spec.noise_every_steps)
        # In the run's first step, which one rank counts for all.
        # A rank that shares layers computes some parts by itself and some alike: its FLOPs do not say the sample's.
        counted = scope.step == 0 and scope.spec.rank == 0 and scope.spec.tp == scope.spec.ep == scope.spec.pp == 1
        self._flops = FlopCount(engine) if counted else None
        self._sample_flops = 0.0

    def close(self) -> None:
        self._engine = self._flops = None

    def needs_own_gradients(self, step: int) -> bool:
        """Are the gradients of step number `step` measured micro-batch by micro-batch, for the gradient noise?"""
        return self._squares.measures(step)

    def forward(self) -> AbstractContextManager[Any]:
        """Around a pass that is trained on."""
        return nullcontext() if self._flops is None else self._flops.forward()

    @contextmanager
    def backward(self, progress: StepProgress, loss: torch.Tensor, scale: float) -> Iterator[None]:
        """Around the backward pass of `loss`, the micro-batch's mean loss times `scale`."""
        engine, batch = self._engine, progress.active
        assert engine is not None
        assert batch is not None
        flops, self._flops = self._flops, None
        counting = nullcontext() if flops is None else flops.backward()
        with self._squares.around(progress.step + 1, engine, loss, scale, batch.weight), counting:
            yield
        if flops is not None:
            self._sample_flops = flops.of_sample(batch.samples, progress.tokens, self._spec.sp)

    def report(
        self, progress: StepProgress, outcome: StepOutcome, loss: float, bad: BadStep | None, duration_s: float,
        leads: bool,
    ) -> StepReport:  # fmt: skip
        """All but `save_stall_s`, `metrics` and `audit`. Only the rank that `leads` its cell reports samples. Waits for
        the device."""
        positions, step = progress.positions() if leads else (), progress.step + 1
        flops, self._sample_flops = self._sample_flops, 0.0
        return StepReport(
            step=step,
            loss=loss,
            positions=() if bad else positions,
            samples=sum(stop - start for start, stop in positions),
            duration_s=duration_s,
            data_wait_s=progress.data_wait_s,
            grad_norm=None if outcome.grad_norm is None else float(outcome.grad_norm),
            learning_rates=outcome.learning_rates,
            tokens=progress.tokens,
            content=progress.content % MODULUS,
            anomaly=str(bad) if bad else "",
            skipped=positions if bad else (),
            noncollective_s=0.0 if outcome.collective_s is None else max(0.0, duration_s - outcome.collective_s),
            gradient_parts=self._squares.taken(step, outcome),
            sample_flops=flops,
            energy_j=self._energy.take(),
            slowed=self._clocks.slowed(),
            # Those of one rank stand for all: the step's volume is the same on each, or nearly so.
            collectives=outcome.collectives if self._spec.rank == 0 else (),
            travel=self._engine.ledger.take_remark() if self._spec.rank == 0 and self._engine is not None else "",
        )

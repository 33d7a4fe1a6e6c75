"""Squared norms of single micro-batches' gradients, read within the backward pass: a moment later they are added up.

Hooks on the leaves get each gradient before it is accumulated or reduced, whatever the engine does with it then. They
exist in measured backward passes only, return nothing, and keep nothing but one number per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.engines.base import Engine, StepOutcome


class GradientSquares:
    """Of one rank, in every step whose number `every_steps` divides; None: in none. For every micro-batch `around`, for
    every step `taken`."""

    def __init__(self, every_steps: int | None) -> None:
        self._every_steps = every_steps
        self._parts: list[torch.Tensor] = []

    def measures(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    @contextmanager
    def around(self, step: int, engine: Engine, loss: torch.Tensor, scale: float, weight: float) -> Iterator[None]:
        """Around the backward pass of `loss`, in step number `step`: the micro-batch's mean loss times `scale`, with
        its share `weight` of the step's samples (0.0: padding, which is not measured).

        Raises UsageError where a gradient does not come in one piece.
        """
        if not self.measures(step) or weight == 0.0:
            yield
            return
        squares: dict[str, list[torch.Tensor]] = {}
        # What the engine multiplies the loss by, its loss scale among it: the gradient of the loss that it was given.
        factors: list[torch.Tensor] = []
        readers: list[tuple[Any, Callable[..., None]]] = [
            (leaf, partial(_add, squares, name)) for name, leaf in engine.leaves().items()
        ]
        hooks = [tensor.register_hook(read) for tensor, read in ((loss, factors.append), *readers)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        _require_whole(squares)
        whole = torch.stack([square for (square,) in squares.values()]).sum()
        factor = factors[0].to(whole.device, torch.float64) * scale
        self._parts.append(whole / factor.square() * weight)

    def taken(self, step: int, outcome: StepOutcome) -> tuple[float, ...]:
        """`StepReport.gradient_parts` of the step just finished. Waits for the device.

        Raises UsageError where the engine computes no norm to compare them with.
        """
        if self._every_steps is None:
            return ()
        if outcome.grad_norm is None:
            raise UsageError(
                "gradient_noise needs the norm of the whole gradient, which this configuration does not compute: let "
                "anomalies.policy be other than off, and leave zero_optimization.compute_grad_norm and torch's "
                "gradient scaler alone; or leave gradient_noise out"
            )
        parts, self._parts = self._parts, []
        if not self.measures(step) or not outcome.applied:
            return ()
        return float(len(parts)), float(torch.stack(parts).sum()) if parts else 0.0


def _add(squares: dict[str, list[torch.Tensor]], name: str, gradient: torch.Tensor) -> None:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    squares.setdefault(name, []).append(torch.linalg.vector_norm(values.detach(), dtype=torch.float64).square())


def _require_whole(squares: dict[str, list[torch.Tensor]]) -> None:
    if not squares:
        raise UsageError(
            "gradient_noise: the backward pass gave no trained parameter a gradient; leave gradient_noise out"
        )
    for name, found in squares.items():
        if len(found) > 1:
            raise UsageError(
                f"gradient_noise: the gradient of parameter {name!r} came in {len(found)} parts within one backward "
                "pass, as reentrant activation checkpointing gives it to shared parameters: use use_reentrant=False, "
                "or leave gradient_noise out"
            )

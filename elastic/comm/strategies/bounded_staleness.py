"""Gradients that are on their way while later steps are computed: each is applied a fixed number of steps late.

In step t a rank hands in its gradient of t and goes on with weights that lack the last `staleness` updates; it waits
only for the mean gradient of step t - staleness. So no rank is more than `staleness` steps ahead of the slowest one, as
in stale synchronous parallel training (Ho et al., NIPS 2013), and an update is one whole global batch (GBA, Su et al.,
arXiv 2205.11048): batch and learning rate keep their meaning.

The delay is fixed, and not "what has arrived by now": the weights that a step is computed with depend neither on time
nor on the number of ranks, so that a run which lost a node has the curve of the undisturbed one. With the last step of
a *round* (`core.checkpoint.rounds`) all that is under way is applied: there the run may be saved, or stop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.checkpoint.shares import Live, Shares, StepPart, Told
from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.strategies.reduction import in_buckets
from elastic.core.checkpoint.rounds import Rounds
from elastic.core.policy.communication import permitted
from elastic.core.settings import CommunicationSettings

logger = logging.getLogger(__name__)

# What each group of an optimizer updates with: its rate, and whatever else it keeps but the parameters.
Rates = Sequence[Mapping[str, Any]]


class Updates(Protocol):
    """The optimizer of one engine."""

    def rates(self) -> Rates:
        """Those of the step under way."""
        ...

    def at(self, rates: Rates) -> AbstractContextManager[None]:
        """Within it, the optimizer updates with these."""
        ...

    def make(self, gradient: Mapping[str, Tensor], rates: Rates) -> None:
        """One update more, clipped as the engine's own; the step's gradient stays."""
        ...


@dataclass(frozen=True)
class _Flight:
    """The gradient of a step under way: names, sum and handle of each bucket. `rates`: those of its update."""

    step: int
    rates: Rates
    buckets: Sequence[tuple[Mapping[str, torch.Size], Tensor, Any]]

    def arrived(self) -> dict[str, Tensor]:
        """The mean by the parameter's name. Waits for the slowest rank."""
        found = dict[str, Tensor]()
        for shapes, flat, handle in self.buckets:
            if handle is not None:
                handle.wait()
            parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
            found |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return found


class BoundedStaleness(Shares):
    """Of one rank in one generation, on the training thread. In every step all ranks `reduce`; then the optimizer makes
    the `updates` that are due: none in the first steps of a round, all that is left in its last step.

    The engine's own update of a step is the last of these. A mean gradient that is not finite takes that place, where
    it is `watched`, so that the engine's step is judged by it; `late` tells how many steps before it was computed.
    """

    def __init__(
        self,
        settings: CommunicationSettings,
        group: dist.ProcessGroup,
        ledger: CollectiveLedger,
        watched: bool,
        updates: Callable[[Callable[[Callable[[], object]], None]], Updates],
    ) -> None:
        """`updates`: that of `elastic.engines.base.GradientSums`."""
        self._settings, self._watched, self._ranks = settings, watched, dist.get_world_size(group)
        self._rounds = Rounds.of(settings)
        self._updates = updates(self._update)
        self._add = ledger.timed("all_reduce", partial(dist.all_reduce, group=group, async_op=True), axis="dp")
        self._flights: list[_Flight] = []
        # Due in this step, in order; the engine's step makes the last.
        self._due: list[tuple[dict[str, Tensor], Rates]] = []
        self._part: Callable[[], StepPart] | None = None
        self._late = 0
        ledger.remark = (
            f"{permitted(settings)[0]}: gradients are applied {settings.staleness} steps late, and all after every "
            f"{self._rounds.every} steps"
        )

    def begin(self, live: Callable[[], Live], part: Callable[[], StepPart], told: Told) -> None:
        self._part = part

    @property
    def whole(self) -> bool:
        return not self._flights

    @property
    def late(self) -> int:
        return self._late

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """`gradients` by the parameter's name go on their way; what is due comes in their place, else zeros."""
        assert self._part is not None
        part = self._part()
        self._flights.append(_Flight(part.step, self._updates.rates(), [*self._depart(gradients)]))
        ends = part.last or self._rounds.begins(part.step + 1) is not None
        kept = 0 if ends else self._settings.staleness
        landing = self._flights[: max(0, len(self._flights) - kept)]
        self._flights = self._flights[len(landing) :]
        arrived = [(flight, flight.arrived()) for flight in landing]
        bad = next((found for found in arrived if self._watched and not _finite(found[1])), None)
        # A second one that is not finite: there is one verdict per step, and it is not to be applied either.
        self._due = [
            (mean, flight.rates) for flight, mean in arrived if bad is None or (flight is not bad[0] and _finite(mean))
        ]
        shown = bad or (arrived[-1] if arrived else None)
        if bad is not None:
            self._due.append((bad[1], bad[0].rates))
        self._late = part.step - shown[0].step if shown is not None else 0
        for name, tensor in gradients.items():
            tensor.zero_() if shown is None else tensor.copy_(shown[1][name])

    def settle(self) -> None:
        """The script ends within a round."""
        for flight in self._flights:
            mean = flight.arrived()
            if self._watched and not _finite(mean):
                logger.warning("step %d: its gradient is not finite and is not applied", flight.step + 1)
            else:
                self._updates.make(mean, flight.rates)
        self._flights = []

    def _update(self, own: Callable[[], object]) -> None:
        """In the engine's step: `own` is its optimizer's, with what it has made of the gradient that is the last."""
        due, self._due = self._due, []
        for mean, rates in due[:-1]:
            self._updates.make(mean, rates)
        if due:
            with self._updates.at(due[-1][1]):
                own()

    def _depart(self, gradients: Mapping[str, Tensor]) -> list[tuple[Mapping[str, torch.Size], Tensor, Any]]:
        names, found = iter(gradients), list[tuple[Mapping[str, torch.Size], Tensor, Any]]()
        for bucket in in_buckets(gradients, int(self._settings.bucket_mb * 1e6)):
            shapes = {name: tensor.shape for tensor, name in zip(bucket, names, strict=False)}
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).div_(self._ranks)
            found.append((shapes, flat, self._add(flat) if self._ranks > 1 else None))
        return found


def _finite(mean: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in mean.values())

"""Audits of one rank's gradients: what is read of them, how ranks compare it, and what follows. See `core.data.audits`.

Hooks on the leaves get each gradient of a micro-batch before it is accumulated or reduced. Where the micro-batch is
another rank's they hand zeros on, so that nothing of it enters the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elastic.comm.agreement import Agreement
from elastic.core.data.audits import (
    Computation,
    Round,
    Verdict,
    comparable,
    difference,
    disputed,
    not_reproducible,
    tolerated,
    vote,
)
from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.step_plan import StepPlan
from elastic.engines.base import Engine
from elastic.training.result import BadStep
from elastic.training.watch.device_kind import kind_of
from elastic.training.watch.exchange import bits, doubles

logger = logging.getLogger(__name__)

# The gradient is compared in at most as many parts, each of neighbouring parameters.
_MOST_PARTS = 32


@dataclass
class _Pass:
    """What was read of one micro-batch, still on the device: (parts, 2) sums and squared norms in fp64."""

    loss: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    forwards: int = 0


@dataclass(frozen=True)
class Settled:
    """What follows from an audit: `again` is the pass that a vote takes, `bad` why the step must not be applied."""

    again: MicroBatch | None = None
    bad: BadStep | None = None


class GradientAudit:
    """Of one engine, for one generation. In every step: `begin` before each forward pass, `around` each backward pass,
    `settle` before the optimizer's step, again after every pass that it asked for; then `take`."""

    def __init__(self, engine: Engine, agreement: Agreement) -> None:
        self._engine = engine
        self._agreement = agreement
        self._own: _Pass | None = None
        self._repeated: list[_Pass] = []
        self._reading: _Pass | None = None
        self._keeps = True
        self._kind = kind_of(engine.device)
        self._parts: list[list[str]] = []
        self._tolerance = 0.0
        # The last step that was finished after all ranks had agreed, and one that is not finished yet.
        self.agreed_step: int | None = None
        self._agreeing: int | None = None
        # Why nothing is compared in this generation.
        self._off = ""
        self._found: dict[int, list[Computation]] = {}
        self._told = ""
        # The round of the vote, where one is under way.
        self._third: Round | None = None

    def begin(self, plan: StepPlan, step: int, batch: MicroBatch) -> None:
        """Before the first forward pass over `batch` in the step that follows `step` finished ones."""
        self._reading = None
        own = batch.audits is None
        # What others' micro-batches give is taken out in any case.
        if own and (self._off or not plan.audits(step) or batch != plan.audited(step, plan.rank)):
            return
        self._keeps = own
        self._reading = _Pass()
        if own:
            self._own = self._reading
        else:
            self._repeated.append(self._reading)

    @contextmanager
    def around(self, loss: torch.Tensor, forwards: int) -> Iterator[None]:
        """Around the backward pass; `loss` is the micro-batch's, before it is scaled, after so many forward passes."""
        reading, self._reading = self._reading, None
        if reading is None:
            yield
            return
        leaves: list[tuple[str, Any]] = list(self._engine.leaves().items())
        count = min(len(leaves), _MOST_PARTS)
        sums = torch.zeros((count, 2), dtype=torch.float64, device=self._engine.device)
        reading.loss, reading.sums, reading.forwards = loss.detach(), sums, forwards
        self._parts = [[] for _ in range(count)]
        read: Callable[..., Any] = _added if self._keeps else _taken
        hooks = []
        for number, (name, leaf) in enumerate(leaves):
            part = number * count // len(leaves)
            self._parts[part].append(name)
            hooks.append(leaf.register_hook(partial(read, sums, part)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def settle(self, plan: StepPlan, step: int) -> Settled:
        """Compare what the ranks have found. Collective in an audited step. Waits for the device."""
        rounds = plan.audits(step)
        if not rounds or self._off:
            self._repeated.clear()
            return Settled()
        for round_ in rounds if self._third is None else (self._third,):
            self._exchange(plan, step, round_)
        disputes = disputed(self._found, self._tolerance)
        of_itself = disputed(self._repetitions(), self._tolerance)
        if not disputes:
            self._agreed(step, rounds)
        elif self._third is None and not_reproducible(len(of_itself), plan.world_size, measuring=True):
            self._give_up(len(of_itself), plan, "their own repetition")
        elif self._third is None and not_reproducible(len(disputes), plan.world_size, measuring=False):
            self._give_up(len(disputes), plan, "another rank")
        elif self._third is None:
            self._third = Round.THIRD if Round.OTHER in rounds else Round.OTHER
            return Settled(again=plan.repeated(step, self._third))
        else:
            return Settled(bad=self._bad([vote(rank, self._comparable(rank), self._tolerance) for rank in disputes]))
        self._own, self._found = None, {}
        return Settled()

    def take(self) -> str:
        """`StepReport.audit` of the step just finished."""
        if self._agreeing is not None:
            self.agreed_step, self._agreeing = self._agreeing, None
        told, self._told = self._told, ""
        return told

    # -- inside --------------------------------------------------------------------------------------------------------

    def _exchange(self, plan: StepPlan, step: int, round_: Round) -> None:
        """Every rank's own computation and its oldest repetition that was not exchanged yet."""
        size = 2 + 2 * len(self._parts)
        mine = [*self._values(self._own, size), *self._values(self._repeated.pop(0), size)]
        table = [doubles(row) for row in self._agreement.by_rank(bits(mine))]
        for rank, row in enumerate(table):
            if not self._found.get(rank) and plan.audited(step, rank) is not None:
                self._found[rank] = [_computation(rank, row[:size])]
        for rank, row in enumerate(table):
            self._found[plan.repeats(step, rank, round_)].append(_computation(rank, row[size:]))
        if round_ is Round.OWN:
            apart = [difference(own, other)[0] for own, other in self._pairs()]
            self._tolerance = tolerated(max(apart), self._engine.device.type != "cpu")

    def _values(self, found: _Pass | None, size: int) -> list[float]:
        """(kind, loss, sums): zeros where the rank had nothing to compute."""
        if found is None or found.loss is None or found.sums is None:
            return [0.0] * size
        values = torch.cat([found.loss.sum().to(found.sums).reshape(1), found.sums.reshape(-1)])
        return [self._kind + found.forwards, *values.cpu().tolist()]

    def _repetitions(self) -> dict[int, list[Computation]]:
        """What each rank has computed of its own micro-batch."""
        return {rank: [one for one in found if one.rank == rank] for rank, found in self._found.items()}

    def _pairs(self) -> list[tuple[Computation, Computation]]:
        return [(own, other) for own, *others in self._found.values() for other in others]

    def _comparable(self, rank: int) -> list[Computation]:
        own, *others = self._found[rank]
        return [own, *(other for other in others if comparable(own, other))]

    def _agreed(self, step: int, rounds: tuple[Round, ...]) -> None:
        pairs = self._pairs()
        apart = [pair for pair in pairs if difference(*pair)[0] > self._tolerance]
        if apart:
            why = "other kinds of device, or other numbers of forward passes in the script"
            self._told = f"not compared for {len(apart)} of {len(pairs)} pairs of passes: {why}"
            return
        if Round.OTHER in rounds:
            self._agreeing, self._told = step + 1, "agreed"
        else:
            self._told = f"measured: the tolerance is {self._tolerance:.2g}"

    def _give_up(self, disputes: int, plan: StepPlan, what: str) -> None:
        self._off = self._told = (
            f"off until the next generation: {disputes} of {plan.world_size} ranks differ from {what}, so the loss "
            "depends on more than the batch, the weights and the random streams (a counter, a generator of the "
            "script's own, the model's buffers, the rank), or the device's kernels are not reproducible"
        )
        if plan.rank == 0:
            logger.warning("audit: %s", self._off)

    def _bad(self, verdicts: list[Verdict]) -> BadStep:
        wrong = sorted({rank for verdict in verdicts for rank in verdict.wrong})
        undecided = sorted({rank for verdict in verdicts for rank in verdict.undecided})
        told = "; ".join(f"{verdict.evidence} in {self._where(verdict.part)}" for verdict in verdicts)
        last = self.agreed_step
        suspects = tuple(wrong or undecided)
        return BadStep("audit", f"{told}; {since(last)}", (), suspects, bool(wrong), last)

    def _where(self, part: int | None) -> str:
        if part is None:
            return "the loss"
        names = self._parts[part]
        return f"the gradient of {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")


def since(agreed_step: int | None) -> str:
    earlier = "no earlier audit of this generation" if agreed_step is None else f"that of step {agreed_step}"
    return f"all ranks agreed in {earlier}"


def _added(sums: torch.Tensor, part: int, gradient: torch.Tensor) -> None:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = values.detach().to(torch.float64)
    sums[part] += torch.stack([values.sum(), values.square().sum()]).to(sums.device)


def _taken(sums: torch.Tensor, part: int, gradient: torch.Tensor) -> torch.Tensor:
    _added(sums, part, gradient)
    return torch.zeros_like(gradient)


def _computation(rank: int, row: list[float]) -> Computation:
    return Computation(rank, tuple(row[1:]), row[0])

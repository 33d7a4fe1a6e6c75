"""All audits of one rank: of its gradients, of its updates, and of what lies in memory between two updates."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from elastic.comm.agreement import Agreement
from elastic.core.data.audits import AuditPlan
from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.update_audits import of_the_script
from elastic.engines.base import Engine
from elastic.engines.live_state import ShardedState
from elastic.training.result import BadStep
from elastic.training.watch.at_rest import AtRest
from elastic.training.watch.audit import GradientAudit, Settled
from elastic.training.watch.device_kind import kind_of
from elastic.training.watch.exchange import texts_by_rank
from elastic.training.watch.update_audit import UpdateAudit

logger = logging.getLogger(__name__)


class Audits:
    """Of one engine, for one generation. In every step:

    1. `begin` before each forward pass, `around` each backward pass
    2. `settle` before the optimizer's step, again after every pass that it asked for
    3. `updating` around the optimizer's step, `updated` after it, then `take`

    `settle` and `updated` are collective.
    """

    def __init__(self, engine: Engine, state: ShardedState, agreement: Agreement, turns: AuditPlan, seed: int) -> None:
        self._agreement = agreement
        self._turns = turns
        self._gradients = GradientAudit(engine, agreement)
        self._updates = UpdateAudit(state, agreement, kind_of(engine.device), seed)
        # A single rank could not tell what its script has changed.
        self._rest = AtRest(engine, state, turns.every_steps) if agreement.world_size > 1 else None
        self._off_told = False
        self._script_told = False

    def begin(self, plan: StepPlan, step: int, batch: MicroBatch, first: bool) -> None:
        """Before the first forward pass over `batch` in the step that follows `step` finished ones; `first`: it is the
        step's first."""
        if first and self._rest is not None:
            self._rest.begin()
        self._gradients.begin(plan, step, batch)

    def around(self, loss: torch.Tensor, forwards: int) -> AbstractContextManager[None]:
        """See `GradientAudit.around`."""
        return self._gradients.around(loss, forwards)

    def settle(self, plan: StepPlan, step: int) -> Settled:
        """May the step be applied? Waits for the device."""
        bad = self._moved(plan, step)
        # A master that has changed in memory may be what makes a gradient differ: it says more.
        return self._gradients.settle(plan, step) if bad is None else Settled(bad=bad)

    @contextmanager
    def updating(self, plan: StepPlan, step: int) -> Iterator[None]:
        with self._updates.around(plan, step):
            yield

    def updated(self, plan: StepPlan, step: int) -> BadStep | None:
        """Why the step just made must not count."""
        verdict = self._updates.settle(plan, step)
        if self._rest is not None:
            self._rest.rest()
        if not verdict.evidence:
            return None
        suspects = verdict.wrong or verdict.undecided
        last = self._gradients.agreed_step
        return BadStep("audit", f"{verdict.evidence}; {self._since()}", (), suspects, bool(verdict.wrong), last)

    def take(self) -> str:
        """`StepReport.audit` of the step just finished."""
        told = self._gradients.take()
        if not told or self._off_told or not self._updates.off:
            return told
        self._off_told = True
        return f"{told}; {self._updates.off}"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _moved(self, plan: StepPlan, step: int) -> BadStep | None:
        """What has changed in memory since the last update."""
        if self._rest is None:
            return None
        own = self._rest.changed(len(plan.deal(step)))
        changed = [bool(flag) for (flag,) in self._agreement.by_rank([len(own)])]
        if not any(changed):
            return None
        if of_the_script(changed):
            self._say_script(own)
            return None
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        texts = texts_by_rank(self._agreement, f"{own[0]}{more}" if own else "")
        wrong = tuple(rank for rank, flag in enumerate(changed) if flag)
        told = "; ".join(f"rank {rank}: {texts[rank]} has changed in memory between two updates" for rank in wrong)
        # A snapshot of the step before was read meanwhile. What the generation began with was read before that.
        sound = step if step == self._turns.first_step else step - 1
        return BadStep("audit", f"{told}; {self._since()}", (), wrong, True, self._gradients.agreed_step, sound)

    def _say_script(self, own: list[str]) -> None:
        if own and not self._script_told and self._agreement.rank == 0:
            logger.warning("audit: %s has changed on most ranks alike: by the script, not by a fault", own[0])
        self._script_told = self._script_told or bool(own)

    def _since(self) -> str:
        last = self._gradients.agreed_step
        return (
            f"all ranks agreed in {'no earlier audit of this generation' if last is None else f'that of step {last}'}"
        )

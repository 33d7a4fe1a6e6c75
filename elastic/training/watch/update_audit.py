"""Audits of the optimizer's step: some weights of every rank are stepped again by two others. See
`core.data.update_audits`.

Every rank reads them before and after the step that it makes anyway, and what it has read is exchanged when the step is
made, before it counts. Nothing of the repetition enters the state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import xxhash

from elastic.comm.agreement import Agreement
from elastic.core.data.audits import Round, Verdict
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.update_audits import Recomputed, judge_updates, update_tolerance
from elastic.engines.live_state import ShardedState
from elastic.training import rng
from elastic.training.watch.exchange import bits, doubles, texts_by_rank
from elastic.training.watch.update_sample import NO_HALF, SAMPLED, Place, Sample, not_repeatable, places, sampling
from elastic.training.watch.update_table import UpdateTable

logger = logging.getLogger(__name__)

# So many weights of all ranks together: every rank gets all of them, some 100 bytes each.
_TABLE = 1 << 20
_MASK62 = (1 << 62) - 1
_ROUNDS = (Round.OWN, Round.OTHER, Round.THIRD)


class UpdateAudit:
    """Of one engine, for one generation: `around` every optimizer step, then `settle`, which is collective in the steps
    that are audited. `kind` stands for the kind of the device; ranks of different ones are not compared."""

    def __init__(self, state: ShardedState, agreement: Agreement, kind: float, seed: int) -> None:
        self._state = state
        self._agreement = agreement
        self._kind = int(kind)
        self._seed = seed
        self._tolerance = 0.0
        self._places: list[Place] = []
        self._sample: Sample | None = None
        # Why no update is compared in this generation.
        self.off = ""
        self._stop(not_repeatable(state.base, (master.tensor.dtype for master in state.masters())))

    @contextmanager
    def around(self, plan: StepPlan, step: int) -> Iterator[None]:
        """Around the optimizer's step that follows `step` finished ones."""
        self._sample = None if self.off or not plan.audits(step) else Sample()
        if self._sample is not None:
            seed = rng.derive(self._seed, "audit", step, plan.rank)
            self._places = places(self._state.masters(), seed, min(SAMPLED, _TABLE // plan.world_size + 1))
        with nullcontext() if self._sample is None else sampling(self._state, self._places, self._sample):
            yield

    def settle(self, plan: StepPlan, step: int) -> Verdict:
        """What the ranks found about each other's updates. Collective where the step was sampled."""
        sample, self._sample = self._sample, None
        if sample is None:
            return Verdict()
        table = UpdateTable.of(self._state, sample.groups)
        own = table.rows(sample, self._places, self._state.masters())
        names = xxhash.xxh3_64_intdigest(table.names.encode()) & _MASK62
        headers = self._agreement.by_rank([len(own), table.width, names, self._kind, table.rounds])
        compared = {tuple(header[1:3]) for header in headers if header[0]}
        if any(header[4] for header in headers):
            self._stop(NO_HALF)
            return Verdict()
        if len(compared) > 1:
            self._stop("the ranks' optimizers do not keep the same state: updates are not audited")
        # None where the step was not applied.
        if len(compared) != 1:
            return Verdict()
        rows = self._exchanged(own, headers)
        found = self._computed(plan, step, table, rows, headers)
        self._measure([statements[0] for statements in found.values()])
        verdict = Verdict() if self.off else judge_updates(found, self._tolerance)
        if len(verdict.wrong) * 2 > plan.world_size:
            self._stop(
                f"updates are not audited until the next generation: {len(verdict.wrong)} ranks differ from others"
            )
            return Verdict()
        if not verdict.evidence:
            return verdict
        return replace(verdict, evidence=f"{verdict.evidence}; {self._where(found, table, sample)}")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _exchanged(self, own: torch.Tensor, headers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Every rank's rows, on the device."""
        longest, width = max(header[0] for header in headers), max(header[1] for header in headers if header[0])
        padded = torch.zeros((longest, width), dtype=torch.float64)
        padded[: len(own)] = own[:, :width]
        tables = self._agreement.gathered(padded)
        return [rows[: header[0]] for rows, header in zip(tables, headers, strict=True)]

    def _computed(
        self,
        plan: StepPlan,
        step: int,
        table: UpdateTable,
        rows: Sequence[torch.Tensor],
        headers: Sequence[Sequence[int]],
    ) -> dict[int, list[Recomputed]]:
        """By rank, what it and two others found of its update."""
        assert plan.audit is not None
        world = plan.world_size
        distances = [plan.audit.distance(step, round_, world) for round_ in _ROUNDS[: 3 if world > 2 else 2]]
        mine: list[float] = []
        for distance in distances:
            of = (plan.rank + distance) % world
            comparable = len(rows[plan.rank]) and len(rows[of]) and headers[of][3] == self._kind
            mine += self._apart(table, rows[of].cpu()) if comparable else (math.nan, 0.0, 0.0)
        found: dict[int, list[Recomputed]] = {rank: [] for rank in range(world)}
        said = [doubles(row) for row in self._agreement.by_rank(bits(mine))]
        for number, distance in enumerate(distances):
            for rank, row in enumerate(said):
                apart, column, element = row[3 * number : 3 * number + 3]
                found[(rank + distance) % world].append(Recomputed(rank, apart, int(column), int(element)))
        return found

    def _apart(self, table: UpdateTable, rows: torch.Tensor) -> tuple[float, float, float]:
        try:
            again = table.again(self._state.base, rows, self._state.masters()[0].tensor.device)
        except Exception as error:
            logger.debug("audit: an update could not be computed again", exc_info=error)
            return math.inf, 0.0, 0.0
        apart, column, element = table.apart(rows, again)
        return apart, float(column), float(element)

    def _measure(self, own: Sequence[Recomputed]) -> None:
        """How closely the ranks repeat their own updates."""
        tolerance = update_tolerance(own, self._tolerance)
        if tolerance is None:
            name = type(self._state.base).__name__
            self._stop(f"updates of {name} are not audited: most ranks cannot repeat their own, weight by weight")
        else:
            self._tolerance = tolerance

    def _where(self, found: Mapping[int, Sequence[Recomputed]], table: UpdateTable, sample: Sample) -> str:
        """The value that differs most. Collective: its rank knows the parameter's name."""
        rank, worst = max(
            ((rank, each) for rank, statements in found.items() for each in statements if not math.isnan(each.apart)),
            key=lambda item: item[1].apart,
        )
        named = ""
        if rank == self._agreement.rank:
            named = f"most in {table.kind(worst.column)} of {table.names_of(sample, self._places)[worst.element]}"
        return texts_by_rank(self._agreement, named)[rank]

    def _stop(self, why: str) -> None:
        self.off = why
        if why and self._agreement.rank == 0:
            logger.warning("audit: %s", why)

"""Audits of real gradients in one process: three ranks in lock-step, models of any shape and dtype."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from elastic.core.data.audits import AuditPlan
from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.step_plan import StepPlan
from elastic.training.watch.audit import GradientAudit, Settled

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STEP = 1
NEVER = 10**9


class Lockstep:
    """The part of `Agreement` that audits use, for ranks that are threads."""

    def __init__(self, rank: int, table: list[list[int]], barrier: threading.Barrier) -> None:
        self._rank, self._table, self._barrier = rank, table, barrier

    def by_rank(self, values: Sequence[int]) -> list[list[int]]:
        self._table[self._rank] = list(values)
        self._barrier.wait(30)
        found = [list(row) for row in self._table]
        self._barrier.wait(30)
        return found


class Ranks:
    """`flip(rank, gradient)`: what a defective device makes of the gradient of the output."""

    def __init__(self, pool: ThreadPoolExecutor, seed: int, first_step: int = NEVER, flip: Any = None) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self._pool, self._flip = pool, flip
        self.dtype = rng.choice(DTYPES)
        widths = [rng.choice((1, 3, 8, 17)) for _ in range(rng.randint(2, 4))]
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Dropout(0.2)).to(self.dtype)
        self.models = [copy.deepcopy(model) for _ in range(RANKS)]
        self._width, self._size = widths[0], rng.randint(1, 5)
        audit = AuditPlan(1, first_step, turn=seed)
        self.plans = [StepPlan(9, 1, RANKS, rank, 90, None, 3, audit=audit) for rank in range(RANKS)]
        table: list[list[int]] = [[] for _ in range(RANKS)]
        barrier = threading.Barrier(RANKS)
        self.audits = []
        for rank, module in enumerate(self.models):
            engine = SimpleNamespace(
                device=torch.device("cpu"), module=module, leaves=lambda module=module: dict(module.named_parameters())
            )
            self.audits.append(GradientAudit(cast(Any, engine), cast(Any, Lockstep(rank, table, barrier))))

    def compute(self, rank: int, batch: MicroBatch) -> None:
        torch.manual_seed(batch.index)
        x = torch.randn(self._size, self._width).to(self.dtype)
        audit, plan = self.audits[rank], self.plans[rank]
        audit.begin(plan, STEP, batch)
        out = self.models[rank](x)
        if self._flip is not None:
            out.register_hook(lambda gradient: self._flip(rank, gradient))
        loss = out.float().square().mean()
        with audit.around(loss, 1):
            loss.backward()

    def step(self) -> list[Settled]:
        for rank, plan in enumerate(self.plans):
            for batch in plan.deal(STEP):
                self.compute(rank, batch)
        return self.settle()

    def settle(self) -> list[Settled]:
        pairs = zip(self.audits, self.plans, strict=True)
        waiting = [self._pool.submit(audit.settle, plan, STEP) for audit, plan in pairs]
        return [found.result(60) for found in waiting]


@pytest.fixture(scope="module")
def pool() -> Any:
    with ThreadPoolExecutor(RANKS) as made:
        yield made


@pytest.mark.wide
@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 3_000), marks=pytest.mark.slow)], ids=str)
def test_healthy_audits_raise_no_alarm(pool: ThreadPoolExecutor, seeds: range) -> None:
    for seed in seeds:
        ranks = Ranks(pool, seed)
        assert ranks.step() == [Settled()] * RANKS, f"seed {seed}, {ranks.dtype}"
        assert [audit.take() for audit in ranks.audits] == ["agreed"] * RANKS


def test_nothing_of_a_repetition_is_left_in_the_gradients(pool: ThreadPoolExecutor) -> None:
    for seed in range(20):
        audited, bare = Ranks(pool, seed), Ranks(pool, seed)
        audited.step()
        for rank, plan in enumerate(bare.plans):
            for batch in plan.deal(STEP)[:-1]:
                bare.compute(rank, batch)
            for one, other in zip(audited.models[rank].parameters(), bare.models[rank].parameters(), strict=True):
                assert one.grad is not None
                assert torch.equal(one.grad, cast(torch.Tensor, other.grad))


@pytest.mark.parametrize("first_step", [NEVER, STEP], ids=["compared", "measured first"])
def test_a_rank_that_computes_wrongly_is_outvoted(pool: ThreadPoolExecutor, first_step: int) -> None:
    for seed in range(60):
        victim = seed % RANKS

        def wrong(rank: int, gradient: torch.Tensor, victim: int = victim) -> torch.Tensor | None:
            return gradient * 1.5 if rank == victim else None

        ranks = Ranks(pool, seed, first_step, wrong)
        asked = ranks.step()
        assert all(found.again is not None for found in asked), f"seed {seed}, {ranks.dtype}: {asked}"
        for rank, found in enumerate(asked):
            ranks.compute(rank, cast(MicroBatch, found.again))
        named = {found.bad for found in ranks.settle()}
        (bad,) = named
        assert bad is not None
        assert (bad.kind, bad.suspects, bad.decided) == ("audit", (victim,), True), f"seed {seed}: {bad}"


def test_a_rank_that_contradicts_itself_is_named_where_repetitions_are_measured(pool: ThreadPoolExecutor) -> None:
    for seed in range(30):
        victim, passes = seed % RANKS, [0] * RANKS

        def erratic(rank: int, gradient: torch.Tensor, victim: int = victim, passes: list[int] = passes) -> Any:
            passes[rank] += 1
            return gradient * (1.0 + passes[rank]) if rank == victim else None

        ranks = Ranks(pool, seed, STEP, erratic)
        for rank, found in enumerate(ranks.step()):
            ranks.compute(rank, cast(MicroBatch, found.again))
        assert {found.bad.suspects for found in ranks.settle() if found.bad is not None} == {(victim,)}

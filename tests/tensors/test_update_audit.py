"""Audits of real optimizer steps in one process: three ranks in lock-step, every optimizer that is audited."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import optim

from elastic.core.data.audits import AuditPlan, Verdict
from elastic.core.data.step_plan import StepPlan
from elastic.core.sharding.layout import Chunk
from elastic.engines.live_state import Fragment, Master
from elastic.training.watch.at_rest import AtRest
from elastic.training.watch.update_audit import UpdateAudit
from elastic.training.watch.update_sample import SAMPLED, Sample, not_repeatable, places, sampling
from elastic.training.watch.update_table import UpdateTable

RANKS = 3
DTYPES = (torch.float32, torch.float32, torch.float64)
OPTIMIZERS: tuple[Callable[[Any], optim.Optimizer], ...] = (
    lambda p: optim.AdamW(p, lr=1e-2),
    lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: optim.SGD(p, lr=0.1),
    lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    lambda p: optim.Adagrad(p, lr=0.1),
    lambda p: optim.NAdam(p),
    lambda p: optim.RAdam(p),
    lambda p: optim.Adamax(p),
    lambda p: optim.Adadelta(p),
    lambda p: optim.ASGD(p, weight_decay=0.1),
    lambda p: optim.Rprop(p),
)


class Lockstep:
    """The part of `Agreement` that audits use, for ranks that are threads."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._table, self._barrier = rank, table, barrier

    def by_rank(self, values: Sequence[int]) -> list[list[int]]:
        return [list(row) for row in self._all(list(values))]

    def gathered(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return self._all(rows.clone())

    def _all(self, own: Any) -> list[Any]:
        self._table[self.rank] = own
        self._barrier.wait(60)
        found = list(self._table)
        self._barrier.wait(60)
        return found


class Shard:
    """One rank's masters in two parameter groups, each a flat of two parameters with padding after them."""

    def __init__(self, seed: int, rank: int, dtype: torch.dtype, make: Callable[[Any], optim.Optimizer]) -> None:
        sizes = [random.Random(seed + number).randint(1, 900) for number in range(4)]
        self._rng = torch.Generator().manual_seed(seed * 10 + rank)
        self.flats = [self._values(a + b + 3, dtype).requires_grad_(True) for a, b in (sizes[:2], sizes[2:])]
        self.base = make([{"params": [self.flats[0]]}, {"params": [self.flats[1]], "weight_decay": 0.01}])
        self.schedule = optim.lr_scheduler.ExponentialLR(self.base, 0.9)
        self._chunks = []
        for group in (0, 1):
            first, second = sizes[2 * group : 2 * group + 2]
            own = (
                Chunk(f"{group}a", 7, first, f"group{group}", 0),
                Chunk(f"{group}b", 0, second, f"group{group}", first),
            )
            self._chunks.append(own)

    def masters(self) -> list[Master]:
        return [
            Master(f"group{number}", number, flat, chunks, tuple(chunk.name for chunk in chunks), replicated=False)
            for number, (flat, chunks) in enumerate(zip(self.flats, self._chunks, strict=True))
        ]

    def weights(self) -> list[Any]:
        return []

    def fragments(self, names: Any = None) -> Any:
        for flat, chunks in zip(self.flats, self._chunks, strict=True):
            kinds = {"master": flat, **self.base.state.get(flat, {})}
            for chunk in chunks:
                for kind, value in kinds.items() if names is None or chunk.name in names else ():
                    if value.numel() == flat.numel():
                        part = value.detach()[chunk.offset : chunk.offset + chunk.numel]
                        yield Fragment(kind, chunk.name, chunk.start, part)

    def step(self) -> None:
        for flat in self.flats:
            flat.grad = self._values(flat.numel(), flat.dtype)
        self.base.step()
        self.schedule.step()

    def _values(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(count, generator=self._rng).to(dtype)


class Ranks:
    def __init__(self, pool: ThreadPoolExecutor, seed: int, world: int = RANKS) -> None:
        dtype, make = random.Random(seed).choice(DTYPES), OPTIMIZERS[seed % len(OPTIMIZERS)]
        self.name = f"seed {seed}: {dtype}"
        self._pool = pool
        table: list[Any] = [None] * world
        barrier = threading.Barrier(world)
        self.shards = [Shard(seed, rank, dtype, make) for rank in range(world)]
        audit = AuditPlan(1, 0, turn=seed)
        self.plans = [StepPlan(9, 1, world, rank, 90, None, 3, audit=audit) for rank in range(world)]
        self.audits = [
            UpdateAudit(cast(Any, shard), cast(Any, Lockstep(rank, table, barrier)), 2.0, seed)
            for rank, shard in enumerate(self.shards)
        ]

    def step(self, number: int) -> Verdict:
        def one(rank: int) -> Verdict:
            audit, plan = self.audits[rank], self.plans[rank]
            with audit.around(plan, number):
                self.shards[rank].step()
            return audit.settle(plan, number)

        found = [waiting.result(60) for waiting in [self._pool.submit(one, rank) for rank in range(len(self.shards))]]
        assert all(verdict == found[0] for verdict in found)
        return found[0]


@pytest.fixture(scope="module")
def pool() -> Any:
    with ThreadPoolExecutor(RANKS) as made:
        yield made


@pytest.mark.wide
def test_healthy_updates_raise_no_alarm(pool: ThreadPoolExecutor) -> None:
    """Bit for bit: nothing had to be tolerated."""
    for seed in range(26):
        ranks = Ranks(pool, seed)
        assert [ranks.step(number) for number in range(10)] == [Verdict()] * 10, ranks.name
        assert [audit.off for audit in ranks.audits] == [""] * RANKS, ranks.name
        assert [audit._tolerance for audit in ranks.audits] == [0.0] * RANKS, ranks.name


@pytest.mark.wide
@pytest.mark.parametrize("seeds", [range(13), pytest.param(range(13, 217), marks=pytest.mark.slow)], ids=str)
def test_ten_thousand_healthy_updates_are_repeated_bit_for_bit(seeds: range) -> None:
    """Fifty each, as each rank repeats them; with the slow ones 10,000."""
    for seed in seeds:
        shard = Shard(seed, 0, DTYPES[seed % len(DTYPES)], OPTIMIZERS[seed % len(OPTIMIZERS)])
        for number in range(50):
            sample, chosen = Sample(), places(shard.masters(), number)
            with sampling(cast(Any, shard), chosen, sample):
                shard.step()
            table = UpdateTable.of(cast(Any, shard), sample.groups)
            rows = table.rows(sample, chosen, shard.masters())
            assert table.apart(rows, table.again(shard.base, rows, torch.device("cpu")))[0] == 0.0, (seed, number)


def test_nothing_of_a_repetition_is_left_in_the_state(pool: ThreadPoolExecutor) -> None:
    for seed in range(len(OPTIMIZERS)):
        audited, bare = Ranks(pool, seed), Ranks(pool, seed)
        for number in range(3):
            audited.step(number)
            for shard in bare.shards:
                shard.step()
        for one, other in zip(audited.shards, bare.shards, strict=True):
            pairs = zip(one.fragments(), other.fragments(), strict=True)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)
            assert len(one.base._optimizer_step_pre_hooks) == len(one.base._optimizer_step_post_hooks) == 0


def test_a_rank_that_updates_wrongly_is_outvoted(pool: ThreadPoolExecutor) -> None:
    for seed in range(26):
        ranks, victim = Ranks(pool, seed), seed % RANKS
        shard = ranks.shards[victim]
        ranks.step(0)
        ranks.step(1)
        at = random.Random(seed).randrange(shard.masters()[0].chunks[0].numel)

        def spoil(*_: Any, shard: Shard = shard, at: int = at) -> None:
            with torch.no_grad():
                shard.flats[0][at] += 0.25

        shard.base.register_step_post_hook(spoil)
        # Of large shards not every weight is sampled every time.
        verdict = next(found for number in range(2, 40) if (found := ranks.step(number)).evidence)
        assert (verdict.wrong, verdict.undecided) == ((victim,), ()), ranks.name
        assert verdict.evidence.endswith("most in master of 0a"), verdict


def test_a_rank_that_repeats_wrongly_is_outvoted(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it computes: also of its own update, which it makes as wrongly."""
    ranks = Ranks(pool, 0)
    ranks.step(0)
    for group in ranks.shards[1].base.param_groups:
        group["eps"] = 0.5
    assert ranks.step(1).wrong == (1,)


def test_two_ranks_tell_that_they_differ(pool: ThreadPoolExecutor) -> None:
    ranks = Ranks(pool, 0, world=2)
    ranks.step(0)
    ranks.shards[1].base.param_groups[0]["betas"] = (0.5, 0.9)
    verdict = ranks.step(1)
    assert (verdict.wrong, verdict.undecided) == ((), (0, 1))


def test_what_is_not_audited_says_why() -> None:
    class Normed(optim.SGD):
        pass

    def told(kind: type[optim.Optimizer], dtype: torch.dtype) -> str:
        return not_repeatable(kind([torch.zeros(2, requires_grad=True)], lr=0.1), [torch.float32, dtype])

    assert told(optim.AdamW, torch.float32) == ""
    assert told(Normed, torch.float32).startswith("updates of Normed are not audited: its step is not known to treat")
    assert "half precision depend on where in a tensor a weight lies" in told(optim.AdamW, torch.bfloat16)


def test_what_is_sampled_is_scattered_and_never_padding() -> None:
    flat = torch.zeros(50_000)
    chunks = (Chunk("a", 0, 100, "g", 0), Chunk("b", 9, 40_000, "g", 200))
    masters = [
        Master("g", 0, flat, chunks, ("a", "b"), False),
        Master("s", 0, torch.zeros(()), (Chunk("s", 0, 1, "s", 0),), ("s",), False),
    ]
    (place,) = places(masters, 5)
    assert SAMPLED - 40 < len(place.at) <= SAMPLED
    inside = [
        (at < 100) if name == "a" else (200 <= at < 40_200)
        for at, name in zip(place.at.tolist(), place.names, strict=True)
    ]
    assert all(inside)
    assert places(masters, 5)[0].at.equal(place.at)
    assert not places(masters, 6)[0].at.equal(place.at)
    (few,) = places(masters[:1], 5, most=40_100)
    assert len(few.at) == 40_100, "all of them, once"
    assert places([], 1) == []


@pytest.mark.wide
def test_ten_thousand_healthy_windows_raise_no_alarm_and_every_flip_is_found() -> None:
    rng = random.Random(1)
    flips = 0
    for seed in range(50):
        shard = Shard(seed, 0, torch.float32, OPTIMIZERS[seed % len(OPTIMIZERS)])
        rest = AtRest(cast(Any, shard), cast(Any, shard), 2)
        for number in range(200):
            rest.begin()
            assert rest.changed(1) == []
            if number % 50 == 0:
                shard.step()
            rest.rest()
        rest.begin()
        victims = [each for each in shard.fragments() if each.tensor.dtype == torch.float32]
        each = rng.choice(victims)
        each.tensor.view(torch.int32)[rng.randrange(each.tensor.numel())] ^= 1 << rng.randrange(31)
        assert rest.changed(1) == [f"{each.kind} of {each.name}"]
        flips += 1
    assert flips == 50


def test_a_large_state_is_read_in_turns() -> None:
    """So much of it in a step as takes the time of a pass, divided by `every_steps`."""
    tensors = {f"{number:02d}": torch.zeros(1 << 20) for number in range(12)}

    def fragments(names: Any = None) -> Any:
        return [Fragment("master", name, 0, value) for name, value in tensors.items() if names is None or name in names]

    engine = SimpleNamespace(fragments=fragments, masters=list, weights=list)
    rest = AtRest(cast(Any, engine), cast(Any, engine), 1 << 30)
    rest.begin()
    assert rest.changed(1) == []
    found = []
    for _ in range(3):
        rest.rest()
        for value in tensors.values():
            value[5] += 1.0
        found.append(rest.changed(1))
    assert [[text.removeprefix("master of ") for text in each] for each in found] == [
        ["00", "01", "02", "03"], ["04", "05", "06", "07"], ["08", "09", "10", "11"],
    ]  # fmt: skip

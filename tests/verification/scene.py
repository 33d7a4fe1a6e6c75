"""Engines of all ranks with a known state in them; what a checkpoint of it gives back, compared by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from verification.crowd import Crowd, as_rank
from verification.model import DTYPES, KINDS, Setup, make_engine, rate, steps_done, value

SAVED, FRESH, OLDER = "saved", "fresh", "older"
RUN = "verification"
_numbers = itertools.count()
# What padding may hold: stage 3 never sets it.
_JUNK = 777.0


@dataclass(frozen=True)
class World:
    """The engines of one world size, by rank."""

    setup: Setup
    version: str
    crowd: Crowd
    engines: Sequence[Any]

    def run(self, work: Callable[[Any, int], Any]) -> list[Any]:
        """`work(engine, rank)` on all ranks at once; what each returned or raised."""
        return self.crowd.run(lambda rank: work(self.engines[rank], rank))


@contextmanager
def world(setup: Setup, world_size: int, version: str) -> Iterator[World]:
    """Engines as a run has them after some steps (or, for FRESH, before the first), holding `version`'s values."""
    from elastic.engines.deepspeed.kind import KIND
    from elastic.engines.deepspeed.teardown import release_engine
    from elastic.training.cleanup import warm_up

    # Stage 3 collects garbage for every engine: what was imported must be out of its sight.
    warm_up(KIND)
    engines: list[Any] = []
    try:
        for rank in range(world_size):
            with as_rank(rank, world_size):
                engines.append(make_engine(setup, version))
        made = World(setup, version, Crowd(world_size), engines)
        if version != FRESH:
            require(made.run(lambda engine, _: fill(engine, setup, version)))
        yield made
    finally:
        Crowd(len(engines)).run(lambda rank: release_engine(engines[rank]))


def require(results: Sequence[Any]) -> Sequence[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def fill(engine: Any, setup: Setup, version: str) -> None:
    """Give the engine of one rank the values of `version`: all that a run changes."""
    stage = stage_of(engine)
    numels = {parameter.name: parameter.numel for parameter in setup.parameters}
    idle = {parameter.name for parameter in setup.trained if parameter.idle}
    kinds, counts = KINDS[setup.optimizer]
    for master in stage.masters():
        flat = master.tensor.detach().reshape(-1)
        content = {"master": flat} | {kind: torch.full_like(flat, _JUNK) for kind in kinds}
        for chunk in master.chunks:
            span, numel = slice(chunk.offset, chunk.offset + chunk.numel), numels[chunk.name]
            weights = value(version, "master", chunk.name, numel, torch.float32)[chunk.start : chunk.stop]
            # DeepSpeed put it there from the model: our idea of who lies where is checked before it is used.
            assert torch.equal(flat[span], weights.to(DTYPES[setup.dtype]).float()), f"{chunk} is not where we say"
            for kind, target in content.items():
                target[span] = value(version, kind, chunk.name, numel, torch.float32)[chunk.start : chunk.stop]
        stage.base.state.pop(master.tensor, None)
        if not (len(master.names) == 1 and idle.intersection(master.names) and stage.zero_stage == 0):
            state = {kind: content[kind].view(master.tensor.shape) for kind in kinds}
            if counts:
                state["step"] = torch.tensor(float(steps_done(version, master.group)))
            stage.base.state[master.tensor] = state
    _fill_counters(engine, setup, version, stage)


def _fill_counters(engine: Any, setup: Setup, version: str, stage: Any) -> None:
    done = steps_done(version, 0)
    for number, group in enumerate(stage.base.param_groups):
        group["lr"], group["weight_decay"] = 0.5 * rate(version, number), 0.1 / (1 + number)
    engine.lr_scheduler.last_epoch = done
    engine.lr_scheduler._last_lr = [group["lr"] for group in stage.base.param_groups]
    engine.global_steps, engine.global_samples, engine.skipped_steps = done, 10 * done, 2
    engine.micro_steps = done * engine.gradient_accumulation_steps()
    if setup.dtype == "fp16":
        from elastic.engines.deepspeed.extra_state import scaler_of

        scaler = scaler_of(engine)
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 2.0**12, 41, 17


def stage_of(engine: Any) -> Any:
    from elastic.engines.deepspeed.state.open import zero_state

    return zero_state(engine)


def open_state(engine: Any) -> Any:
    from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
    from elastic.training.state import engine_state

    return engine_state.open_state(DeepSpeedAdapter(engine))


@dataclass(frozen=True)
class Place:
    """Where one rank would continue: its state to be saved, and (micro-batch, samples, seed) of its next passes."""

    caller: dict[str, Any]
    passes: tuple[Any, ...]


def place(rank: int, world_size: int, saved: dict[str, Any] | None, step: int) -> tuple[Place, Any, Any]:
    """The place of a rank, its plan and its order, as the engine and the loader have them after `step` steps."""
    from elastic.core.data.samples import SampleOrder
    from elastic.core.data.step_plan import StepPlan
    from elastic.training import rng
    from elastic.training.user.state import State

    passes = -(-4 // world_size)
    plan = StepPlan(10, 3, world_size, rank, dataset_size=37, total_samples=3700, micro_steps=passes)
    order, user = SampleOrder(37, seed=7), State()
    user.load(saved["user"] if saved is not None else {"best": 0.5})
    data = {"seed": 7, "global_batch": 10, "micro_batch": 3, "dataset_size": 37}
    caller = {"step": step, "position": plan.position(step), "data": data, "user": user.dump()}
    drawn = [
        (
            batch.index,
            tuple(order.indices(batch.start, batch.stop)),
            rng.derive(*rng.forward_stream(7, step, batch.index, 0)),
        )
        for batch in plan.deal(step)
        if batch.weight > 0
    ]
    return Place(caller, tuple(drawn)), plan, order


def save(source: World, store_url: str | None = None) -> tuple[Any, str]:
    """Snapshot, shards, manifest: (store, checkpoint id)."""
    from elastic.checkpoint.storage import CheckpointStore
    from elastic.core.checkpoint.assembly import assemble

    store = CheckpointStore(store_url or f"memory://verification-{next(_numbers)}", RUN)
    step = steps_done(source.version, 0)

    def shard(engine: Any, rank: int) -> Any:
        state = open_state(engine)
        state.verify_replicas()
        caller = place(rank, source.crowd.world_size, None, step)[0].caller
        return store.write_shard(state.snapshot(run_id=RUN, generation=1, step=step, caller=caller))

    manifest = assemble(require(source.run(shard)), run_id=RUN)
    store.commit(manifest)
    return store, manifest.id


def restore(target: World, source_of: Callable[[int], Any], checkpoint: str, later: bool = False) -> list[Any]:
    """The `Place` of each rank, or what it raised; `source_of(rank)` is where that rank reads.

    Everything up to the first step, as the engine does it.
    """

    def work(engine: Any, rank: int) -> Place:
        from elastic.training.data import cursor

        state = open_state(engine)
        _, saved = state.restore(source_of(rank), checkpoint, later=later)
        own, plan, order = place(rank, target.crowd.world_size, dict(saved), saved["step"])
        cursor.verify(saved, own.caller, plan, order, state.agreement)
        state.verified()
        return own

    return target.run(work)

"""Engines of all ranks with a known state in them; what a checkpoint of it gives back, compared by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from proof.crowd import Crowd, as_rank
from proof.model import DTYPES, KINDS, Setup, make_engine, rate, steps_done, value

SAVED, FRESH, OLDER = "saved", "fresh", "older"
RUN = "proof"
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
    from elastic.training.cleanup import release_engine, warm_up

    # Stage 3 collects garbage for every engine: what was imported must be out of its sight.
    warm_up()
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
        for piece in master.pieces:
            span, numel = slice(piece.offset, piece.offset + piece.numel), numels[piece.name]
            weights = value(version, "master", piece.name, numel, torch.float32)[piece.start : piece.stop]
            # DeepSpeed put it there from the model: our idea of who lies where is checked before it is used.
            assert torch.equal(flat[span], weights.to(DTYPES[setup.dtype]).float()), f"{piece} is not where we say"
            for kind, target in content.items():
                target[span] = value(version, kind, piece.name, numel, torch.float32)[piece.start : piece.stop]
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
        from elastic.training.state.client import _scaler

        scaler = _scaler(engine)
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 2.0**12, 41, 17


def stage_of(engine: Any) -> Any:
    from elastic.training.state import _stage_of

    return _stage_of(engine)


def save(source: World, store_url: str | None = None) -> tuple[Any, str]:
    """Snapshot, shards, manifest: (store, checkpoint id)."""
    from elastic.checkpoint.storage import CheckpointStore
    from elastic.core.assembly import assemble
    from elastic.training.state import open_state

    store = CheckpointStore(store_url or f"memory://proof-{next(_numbers)}", RUN)
    step = steps_done(source.version, 0)
    caller = {"step": step, "user": {"best": 0.5}}

    def shard(engine: Any, rank: int) -> Any:
        snapshot = open_state(engine).snapshot(run_id=RUN, generation=1, step=step, client=caller)
        return store.write_shard(snapshot)

    manifest = assemble(require(source.run(shard)), run_id=RUN)
    store.commit(manifest)
    return store, manifest.id


def restore(target: World, source_of: Callable[[int], Any], checkpoint: str) -> list[Any]:
    """What `restore` returned or raised, by rank; `source_of(rank)` is where that rank reads."""
    from elastic.training.state import open_state

    return target.run(lambda engine, rank: open_state(engine).restore(source_of(rank), checkpoint))


# -- comparing ------------------------------------------------------------------------------------------------------


def differences(target: World, source: World) -> list[str]:
    """What the target holds otherwise than the source's version says; empty when the state is the saved one."""
    setup, version = target.setup, source.version
    wanted = require(source.run(lambda engine, _: _plain(engine)))[0]
    found = require(target.run(lambda engine, rank: _differs(engine, setup, version, wanted)))
    return [f"rank {rank}: {what}" for rank, own in enumerate(found) for what in own]


def _differs(engine: Any, setup: Setup, version: str, wanted: dict[str, Any]) -> list[str]:
    numels = {parameter.name: parameter.numel for parameter in setup.parameters}
    stage = stage_of(engine)
    kinds, _ = KINDS[setup.optimizer]
    found = []
    for master in stage.masters():
        state = stage.base.state.get(master.tensor) or {}
        tensors = {"master": master.tensor, **{kind: state.get(kind) for kind in kinds}}
        absent = stage.zero_stage == 0 and any(p.idle and p.name in master.names for p in setup.trained)
        for piece in master.pieces:
            for kind, tensor in tensors.items():
                whole = value(version, kind, piece.name, numels[piece.name], torch.float32)
                if kind != "master" and (absent or tensor is None):
                    if absent != (tensor is None):
                        found.append(f"{kind}/{piece.name} {'should not be' if absent else 'is not'} there")
                    continue
                part = tensor.detach().reshape(-1)[piece.offset : piece.offset + piece.numel]
                if not torch.equal(part, whole[piece.start : piece.stop]):
                    found.append(f"{kind}/{piece.name}")
    found += _wrong_weights(engine, setup, version)
    plain = _plain(engine)
    found += [f"{key} is {plain.get(key)}, was {wanted[key]}" for key in wanted if plain.get(key) != wanted[key]]
    return found + _not_live(engine, stage)


def _wrong_weights(engine: Any, setup: Setup, version: str) -> list[str]:
    """The tensors that a forward pass would use, by the model's own names."""
    found = []
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    for parameter in setup.parameters:
        whole = value(version, "master", parameter.name, parameter.numel, torch.float32).to(DTYPES[setup.dtype])
        for name in (parameter.name, *parameter.ties):
            if not torch.equal(*_comparable(named[name], whole)):
                found.append(f"weight/{name}")
    buffers = dict(engine.module.named_buffers())
    for buffer in setup.buffers:
        live = buffers[buffer.name]
        if not torch.equal(live.reshape(-1), value(version, "buffer", buffer.name, live.numel(), live.dtype)):
            found.append(f"buffer/{buffer.name}")
    return found


def _comparable(live: Any, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank has of a parameter, and what it should be."""
    if not hasattr(live, "ds_tensor") or live.data.numel() == whole.numel():
        return live.detach().reshape(-1), whole
    start = live.ds_tensor.numel() * _rank(live)
    part = whole[start : start + live.ds_tensor.numel()]
    return live.ds_tensor.detach().reshape(-1)[: part.numel()], part


def _rank(live: Any) -> int:
    from deepspeed import comm

    return int(comm.get_rank())


def _plain(engine: Any) -> dict[str, Any]:
    """All that is no tensor, by name."""
    from elastic.training.state.client import read_client
    from elastic.training.state.inventory import Inventory

    stage = stage_of(engine)
    client = read_client(engine, stage, Inventory.of(stage, engine.module), {})
    scalars = {name: entry["values"] for entry in client["optimizer"]["scalars"] for name in entry["names"]}
    groups = {f"group {i}: {k}": v for i, g in enumerate(client["optimizer"]["groups"]) for k, v in g["hyper"].items()}
    steps = {f"scalars of {name}": values for name, values in scalars.items()}
    counters = {name: number for name, number in client["engine"].items() if name != "micro_steps"}
    return {**steps, **groups, **counters, "scaler": client["loss_scaler"], "scheduler": client["scheduler"]}


def _not_live(engine: Any, stage: Any) -> list[str]:
    """Is a rate written by the scheduler one that the optimizer's step reads? Is one step counted once?"""
    found = []
    for number, group in enumerate(stage.base.param_groups):
        for holder in (engine.optimizer, engine.basic_optimizer, engine.lr_scheduler.optimizer):
            if holder.param_groups[number] is not group:
                found.append(f"group {number} of {type(holder).__name__} is not the live one")
    counts = [state["step"] for state in stage.base.state.values() if isinstance(state.get("step"), torch.Tensor)]
    if len({id(count) for count in counts}) != len(counts):
        found.append("one step count serves two tensors")
    return found

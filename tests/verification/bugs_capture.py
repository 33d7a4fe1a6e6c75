"""Bugs on the way from the live engine into a snapshot: what is saved is not what the engine holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from verification.model import value
from verification.tools import Change, changed, modules


def stale(key: str) -> Change:
    """One tensor is copied from where it lay at an older step."""
    kind, name = key.split("/")

    def older(tensor: torch.Tensor) -> torch.Tensor:
        return value("older", kind, name, tensor.numel(), torch.float32).to(tensor.dtype)

    return _copied(lambda item: replace(item, source=older(item.source)) if item.key == key else item)


def through_bf16() -> Change:
    def cast(item: Any) -> Any:
        is_master = item.key.startswith("master/")
        return replace(item, source=item.source.to(torch.bfloat16).to(item.source.dtype)) if is_master else item

    return _copied(cast)


def _copied(instead: Callable[[Any], Any]) -> Change:
    def wanted(original: Any, self: Any) -> Any:
        inventory, layout, items = original(self)
        return inventory, layout, [instead(item) for item in items]

    return changed(modules().engine_state.EngineState, "_wanted", wanted)


def moments_left_out() -> Change:
    """Of the second parameter group."""

    def states(original: Any, base: Any, masters: Any) -> Any:
        found = zip(masters, original(base, masters), strict=True)
        return [replace(state, tensors={}) if master.group == 1 else state for master, state in found]

    return changed(modules().inventory, "read_states", states)


def swapped() -> Change:
    def states(original: Any, base: Any, masters: Any) -> Any:
        turned = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
        return [
            replace(state, tensors={turned[kind]: tensor for kind, tensor in state.tensors.items()})
            for state in original(base, masters)
        ]

    return changed(modules().inventory, "read_states", states)


def scheduler_one_step_old() -> Change:
    def read(original: Any, engine: Any) -> Any:
        found = original(engine)
        return {**found, "state": {**found["state"], "last_epoch": found["state"]["last_epoch"] - 1}}

    return changed(modules().extra_state, "read_scheduler", read)


def counters_one_step_old() -> Change:
    def read(original: Any, engine: Any) -> Any:
        found = original(engine)
        counters = found["engine"]
        return {**found, "engine": {**counters, "global_steps": counters["global_steps"] - 1}}

    return changed(modules().extra_state, "read", read)


def scaler_one_step_old() -> Change:
    def read(original: Any, engine: Any) -> Any:
        found = original(engine)
        return {**found, "values": {**found["values"], "cur_iter": found["values"]["cur_iter"] - 1}}

    return changed(modules().extra_state, "read_scaler", read)


def rate_one_step_old() -> Change:
    def read(original: Any, state: Any) -> Any:
        return [{**group, "hyper": {**group["hyper"], "lr": 2 * group["hyper"]["lr"]}} for group in original(state)]

    return changed(modules().generic_extra_state, "read_groups", read)


def count_one_step_old() -> Change:
    """The optimizer's own step counts."""

    def states(original: Any, base: Any, masters: Any) -> Any:
        return [
            replace(state, scalars={key: number - 1 for key, number in state.scalars.items()})
            for state in original(base, masters)
        ]

    return changed(modules().inventory, "read_states", states)


def buffers_of_rank_1() -> Change:
    def written(original: Any, self: Any, rank: int, world_size: int, writers: Any = None) -> Any:
        # Rank 0's part has the buffers; the other parts of ranks 0 and 1 stay what they are.
        if rank > 1:
            return original(self, rank, world_size, writers)
        others = replace(self, extras=tuple(extra for extra in self.extras if extra.kind != "buffer"))
        if rank == 0:
            return original(others, 0, world_size, writers)
        mine, buffers = original(others, 1, world_size, writers), replace(self, masters=(), extras=_buffers(self))
        theirs = original(buffers, 0, world_size, writers)
        return replace(mine, chunks=(*mine.chunks, *theirs.chunks), buffers={**mine.buffers, **theirs.buffers})

    return changed(modules().inventory.Inventory, "written", written)


def _buffers(inventory: Any) -> Any:
    return tuple(extra for extra in inventory.extras if extra.kind == "buffer")


def drifted_buffers(world: Any) -> None:
    """Batch statistics differ from rank to rank."""

    def drift(engine: Any, rank: int) -> None:
        dict(engine.module.named_buffers())["drift.mean"].add_(float(rank))

    world.run(drift)

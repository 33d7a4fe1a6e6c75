"""Bugs in who holds what, and in what is written for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from verification.tools import Change, changed, modules, together


def names(pairs: dict[str, str]) -> Change:
    """A plan that takes one parameter's elements for another's."""
    return changed(
        modules().reshard.SourceIndex, "_intervals", lambda original, self, name: original(self, pairs.get(name, name))
    )


def sorted_names() -> Change:
    # In the model's order 2 comes before 10, in that of sorted names after.
    return names({"layers.2.weight": "layers.10.weight", "layers.10.weight": "layers.2.weight"})


def local_ranks() -> Change:
    def of_four(original: Any, group: Any) -> tuple[int, int]:
        rank, size = original(group)
        return rank % 4, size

    return changed(modules().zero, "rank_in", of_four)


def ranks_exchanged() -> Change:
    """The layout is that of another rank, consistently."""
    return changed(modules().zero, "rank_in", lambda original, group: (original(group)[0] ^ 1, original(group)[1]))


def offsets_go_on() -> Change:
    def masters(original: Any, self: Any) -> Any:
        found, offset = [], 0
        for master in original(self):
            chunks = tuple(chunk._replace(offset=chunk.offset + offset) for chunk in master.chunks)
            found.append(replace(master, chunks=chunks))
            offset += sum(chunk.numel for chunk in master.chunks)
        return found

    return changed(modules().stage3.Stage3State, "masters", masters)


def slices(wrong: Callable[..., Any]) -> Change:
    return changed(modules().stage3.Stage3State, "_slice", wrong)


def absolute(original: Any, self: Any, parameter: Any) -> tuple[int, int]:
    from elastic.engines.deepspeed.state.zero import own_numel

    part, numel = int(parameter.partition_numel()), own_numel(parameter)
    return self.rank * part, min(part, abs(numel - self.rank * part))


def floor(original: Any, self: Any, parameter: Any) -> tuple[int, int]:
    from elastic.engines.deepspeed.state.zero import own_numel

    numel = own_numel(parameter)
    part = numel // self.world_size
    return self.rank * part, min(part, numel - self.rank * part)


def tail_alignment() -> Change:
    def chunk(original: Any, self: Any, parameter: Any, begin: int, at: int, part: int, buffer: str) -> Any:
        return original(self, parameter, begin, at // part * (part - 1), part - 1, buffer)

    return changed(modules().partitioned.PartitionedState, "_chunk", chunk)


def _as_registered(original: Any, self: Any) -> Any:
    return [modules().partitioned._end_to_end(group) for group in self._listed()]


def registration_order() -> Change:
    return changed(modules().partitioned.PartitionedState, "_placed", _as_registered)


def registration_order_everywhere() -> Change:
    """Both our look at the engine and the layout that it is compared with are wrong in the same way."""
    unordered = changed(
        modules().partitioned, "zero12_layout", lambda original, *a, **k: original(*a, **{**k, "round_robin": False})
    )
    return together(registration_order(), unordered)


def dealt_shards() -> Change:
    """Every rank's own slice is taken for one more replica, and one rank writes each."""

    def written(original: Any, self: Any, rank: int, world_size: int, writers: Any = None) -> Any:
        masters = tuple(replace(master, replicated=bool(master.chunks)) for master in self.masters)
        return original(replace(self, masters=masters), rank, world_size, writers)

    return changed(modules().inventory.Inventory, "written", written)


def rank_0_only() -> Change:
    def assemble(original: Any, shards: Any, **more: Any) -> Any:
        return original([shard for shard in shards if shard.rank == 0], **more)

    return changed(modules().assembly, "assemble", assemble)


def written_without(name: str, from_rank: int) -> Change:
    def written(original: Any, self: Any, rank: int, world_size: int, writers: Any = None) -> Any:
        layout = original(self, rank, world_size, writers)
        if rank < from_rank:
            return layout
        return replace(layout, chunks=tuple(chunk for chunk in layout.chunks if chunk.name != name))

    return changed(modules().inventory.Inventory, "written", written)


def untie(world: Any) -> None:
    """The target's model was built without its tie."""
    for engine in world.engines:
        module = engine.module
        module.head.weight = torch.nn.Parameter(module.embedding.weight.detach().clone(), requires_grad=False)


def drifted(name: str) -> Callable[[Any], None]:
    """One rank's copy of a tensor is another one when the snapshot is taken."""

    def drift(world: Any) -> None:
        def one(engine: Any, rank: int) -> None:
            live = dict(engine.module.named_parameters())[name]
            owner = next(r for r in range(world.crowd.world_size) if _writes(engine, r, world, name))
            if rank == owner:
                live.data.mul_(1.5)

        world.run(one)

    return drift


def _writes(engine: Any, rank: int, world: Any, name: str) -> bool:
    from verification.scene import stage_of

    inventory = modules().inventory.Inventory.of(stage_of(engine))
    return any(chunk.name == name for chunk in inventory.written(rank, world.crowd.world_size).chunks)

"""DeepSpeed 0.19.8's partitioning as pure functions: which rank holds which slice, computed before any process starts.

The rules are those of `deepspeed/runtime/zero/stage_1_and_2.py` (430-586, 901-922, 2559-2577), `stage3.py` (726-750,
1210-1233, 1948-1956) and `partition_parameters.py` (1690-1699, 1816-1875). `groups` are the optimizer's parameter
groups in its order, each a list of (name, numel) of the trainable parameters in the group's order. As in DeepSpeed,
parameters without elements and groups without parameters are left out before anything is numbered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from elastic.core.errors import UsageError
from elastic.core.sharding.layout import Chunk, Layout, RankLayout

Group = Sequence[tuple[str, int]]

# stage_1_and_2.py:387: partitions begin on 4 bytes when elements have two.
_START_ALIGNMENT = 2


def zero12_layout(
    groups: Sequence[Group], world_size: int, *, round_robin: bool = False, parameter_alignment_elements: int = 1
) -> Layout:
    """Stages 1 and 2: group i is one flat buffer "group<i>", cut into equal parts after padding its end.

    `round_robin` is DeepSpeed's `round_robin_gradients`. `parameter_alignment_elements` is 16 bytes in elements of the
    model's dtype (4 for fp32, 8 for bf16) when `parameter_alignment` is on, else 1.
    """
    kept = _without_empty(groups, world_size)
    chunks: list[list[Chunk]] = [[] for _ in range(world_size)]
    buffers: dict[str, int] = {}
    for number, group in enumerate(kept):
        buffer = f"group{number}"
        order = _round_robin(group, world_size) if round_robin else list(group)
        length = 0
        placed = []
        for name, numel in order:
            length += -length % parameter_alignment_elements
            placed.append((name, numel, length))
            length += numel
        alignment = _START_ALIGNMENT * world_size
        part = (length + -length % alignment) // world_size
        buffers[buffer] = part
        for name, numel, begin in placed:
            _cut(name, numel, begin, part, buffer, chunks)
    return _layout(kept, chunks, [buffers] * world_size)


def zero3_layout(
    groups: Sequence[Group], world_size: int, sub_group_size: int = 1_000_000_000, *, only: int | None = None
) -> Layout:
    """Stage 3: each parameter is cut into world_size equal parts, and parts are laid end to end in sub-groups "sub<i>".

    A sub-group is closed at `sub_group_size` *partitioned* elements, so how many there are depends on the world size.
    With `only` a rank, the others' chunks are left out: a thousand parameters on a thousand ranks are a million.
    """
    kept = _without_empty(groups, world_size)
    chunks: list[list[Chunk]] = [[] for _ in range(world_size)]
    buffers: dict[str, int] = {}
    sub_groups = [sub for group in kept for sub in _sub_groups(group, world_size, sub_group_size)]
    for number, sub_group in enumerate(sub_groups):
        buffer = f"sub{number}"
        offset = 0
        for name, numel in sub_group:
            part = -(-numel // world_size)
            holders = -(-numel // part)
            for rank in range(holders) if only is None else range(only, min(only + 1, holders)):
                start = rank * part
                chunks[rank].append(Chunk(name, start, min(part, numel - start), buffer, offset))
            offset += part
        buffers[buffer] = offset
    return _layout(kept, chunks, [buffers] * world_size)


def replicated_layout(tensors: Group, world_size: int) -> Layout:
    """Stage 0, frozen parameters, module buffers: every rank holds every tensor whole, in a buffer of its own name."""
    kept = _without_empty([tensors], world_size)
    whole = [tensor for group in kept for tensor in group]
    chunks = [Chunk(name, 0, numel, name, 0) for name, numel in whole]
    return _layout(kept, [chunks] * world_size, [dict(whole)] * world_size)


def owner_layout(tensors: Group, world_size: int) -> Layout:
    """As `replicated_layout`, but each tensor is held by exactly one rank: who writes what of a replicated state.

    The largest tensors are dealt first, each to the rank with the least so far (Graham 1969), ties to the lowest rank.
    """
    kept = _without_empty([tensors], world_size)
    whole = [tensor for group in kept for tensor in group]
    owner: dict[str, int] = {}
    loads = [(0, rank) for rank in range(world_size)]
    # sorted() is stable: equal sizes stay in the model's order, which is the same on every rank.
    for name, numel in sorted(whole, key=lambda tensor: -tensor[1]):
        load, rank = heapq.heappop(loads)
        owner[name] = rank
        heapq.heappush(loads, (load + numel, rank))
    chunks: list[list[Chunk]] = [[] for _ in range(world_size)]
    buffers: list[dict[str, int]] = [{} for _ in range(world_size)]
    for name, numel in whole:
        chunks[owner[name]].append(Chunk(name, 0, numel, name, 0))
        buffers[owner[name]][name] = numel
    return _layout(kept, chunks, buffers)


def _cut(name: str, numel: int, begin: int, part: int, buffer: str, chunks: list[list[Chunk]]) -> None:
    """Cut a parameter that lies at [begin, begin + numel) of a flat group at every multiple of `part`."""
    for rank in range(begin // part, (begin + numel - 1) // part + 1):
        low, high = max(begin, rank * part), min(begin + numel, (rank + 1) * part)
        chunks[rank].append(Chunk(name, low - begin, high - low, buffer, low - rank * part))


def _round_robin(group: Group, world_size: int) -> list[tuple[str, int]]:
    return [tensor for first in range(world_size) for tensor in group[first::world_size]]


def _sub_groups(group: Group, world_size: int, sub_group_size: int) -> list[list[tuple[str, int]]]:
    closed: list[list[tuple[str, int]]] = []
    open_group: list[tuple[str, int]] = []
    size = 0
    for name, numel in group:
        open_group.append((name, numel))
        size += -(-numel // world_size)
        if size >= sub_group_size:
            closed.append(open_group)
            open_group, size = [], 0
    return [*closed, open_group] if open_group else closed


def _without_empty(groups: Sequence[Group], world_size: int) -> list[list[tuple[str, int]]]:
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1, got {world_size}")
    kept = [[(name, numel) for name, numel in group if numel > 0] for group in groups]
    names = [name for group in kept for name, _ in group]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"parameter {twice!r} is given to the optimizer twice")
    return [group for group in kept if group]


def _layout(groups: Sequence[Group], chunks: Sequence[Sequence[Chunk]], buffers: Sequence[dict[str, int]]) -> Layout:
    numels = {name: numel for group in groups for name, numel in group}
    ranks = (RankLayout(tuple(own), dict(sizes)) for own, sizes in zip(chunks, buffers, strict=True))
    return Layout(numels, tuple(ranks))

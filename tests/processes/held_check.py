"""What a rank tells of the training state that it holds, against what it has, at world sizes of no test machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def tensors_of(zero: dict[str, Any], shapes: Iterable[tuple[tuple[int, ...], dict[str, Any]]]) -> list[Any]:
    """fp32 before the optimizer has made any state: weights, gradients and masters, by the stage's own rule."""
    import math

    from elastic.core.sharding.mesh_memory import HeldTensors

    lane, data, reached = {1: (8, 4, 0), 2: (4, 4, 4), 3: (0, 12, 0)}[zero["stage"]]
    sizes = {"lane_bytes": lane, "data_bytes": data, "reached_bytes": reached}
    return [HeldTensors(shape[0], math.prod(shape[1:]), **sizes, **more) for shape, more in shapes]


def frozen(zero: dict[str, Any], shape: tuple[int, ...]) -> list[Any]:
    """Stage 3 shards it as all others."""
    return [
        each._replace(lane_bytes=0, data_bytes=4)
        if zero["stage"] == 3
        else each._replace(lane_bytes=4, data_bytes=0, reached_bytes=0)
        for each in tensors_of(zero, [(shape, {})])
    ]


def check(sharded: Any, rank: int, world_size: int, mesh: dict[str, int], tensors: list[Any]) -> None:
    """The first rank tells of these tensors, whichever the mesh, so that from one mesh another one is known; and what
    is computed from them of the fullest rank is what that one has."""
    import torch

    from elastic.core.mesh import MeshSettings
    from elastic.core.sharding.mesh_memory import HeldState, state_bytes, together
    from elastic.training.watch.held_state import held_state

    held, own = held_state(sharded, torch.device("cpu"), mesh.get("tp", 1))
    expected = HeldState(held.cut_by, together(tensors), slices=held.slices)
    computed = state_bytes(expected, MeshSettings(**mesh), world_size)
    # Of stage 2's whole gradients only a bound is known: see `held_ranks` for what there is.
    exact = rank == 0 and not any(each.reached_bytes for each in tensors)
    assert own == computed if exact else own <= computed, (own, computed)
    assert rank > 0 or held == expected, (held, expected)

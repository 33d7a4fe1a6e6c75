"""Which ranks have which parts of a sharded parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.meshes import COPIES, EXPERTS, over_cell
from elastic.engines.fsdp2.update.stand_ins import local_of

# The axis of a mesh that has but one, and no name for it.
_ONLY = "dp"

Box = tuple[slice, ...]
Ends = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """What `ranks` have of a tensor, each all of it; the first of them gives it."""

    box: Box
    ranks: tuple[int, ...]


def parts_of(parameter: DTensor) -> tuple[Part, ...]:
    """Its parts and their ranks, in the order of the first of these. A lane's slice is cut by rows over the lane, and
    experts over the ranks with the same ones. Raises UsageError where torch has sharded it otherwise."""
    mesh = parameter.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (_ONLY,), mesh.shape, strict=True))
    placement = over_cell(parameter)
    cut = placement.dim % parameter.dim() if isinstance(placement, Shard) else None
    boxes = _boxes(tuple(parameter.shape), tuple(sizes.items()), cut)
    ranks: dict[Ends, list[int]] = {}
    for box, rank in zip(boxes, mesh.mesh.flatten().tolist(), strict=True):
        ranks.setdefault(box, []).append(rank)
        if rank == dist.get_rank() and tuple(end - begin for begin, end in box) != local_of(parameter).shape:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} has {tuple(local_of(parameter).shape)} here where "
                f"{box} was expected: this torch shards otherwise"
            )
    return tuple(Part(tuple(slice(*ends) for ends in box), tuple(of)) for box, of in ranks.items())


@cache
def _boxes(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], cut: int | None) -> list[Ends]:
    """First index in each dimension, and the one after the last, of what each rank of a mesh has, in the order of its
    coordinates. `sizes`: its axes. `cut`: the dimension that the ranks of a cell cut."""
    axes, found = dict(sizes), []
    shards = math.prod(size for name, size in sizes if name not in (COPIES, EXPERTS, "tp"))
    for coordinate in product(*(range(size) for _, size in sizes)):
        at = dict(zip(axes, coordinate, strict=True))
        ends = [[0, size] for size in shape]
        if cut is not None:
            part = shape[cut] // axes["tp"]
            ends[cut] = [at["tp"] * part, (at["tp"] + 1) * part]
        first, last = ends[0]
        rows = (last - first) // axes.get(EXPERTS, 1)
        first += rows * at.get(EXPERTS, 0)
        block = -(-rows // shards)
        (shard,) = [where for name, where in at.items() if name not in (COPIES, EXPERTS, "tp")]
        ends[0] = [first + min(rows, shard * block), first + min(rows, (shard + 1) * block)]
        found.append(tuple((begin, end) for begin, end in ends))
    return found

"""The live tensors of one rank, parameter by parameter: what verification compares the sharded state with.

It shares no way to them with `Fsdp2State`: a shard's place is what torch's own rule for DTensors says, and its length
what torch stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic.engines.fsdp2.meshes import axis_of_cell, over_cell
from elastic.engines.fsdp2.sharding import reshard
from elastic.engines.live_state import BUFFER, MASTER, PARAM, Fragment
from elastic.engines.model.plain_names import named_buffers, named_parameters
from elastic.engines.optimizer.other_shapes import without_tensors

# Of tensors by shape and place, as asked at every snapshot: torch takes 0.1 ms for each.
_starts: dict[Hashable, int] = {}
_MAX_STARTS = 10_000


def fragments(engine: Any, names: Collection[str] | None = None) -> Iterator[Fragment]:
    """Of the tensors in `names`, or of all: trained parameters with optimizer state, frozen ones, module buffers."""
    stepped = {id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in _parameters(engine, names):
        trained = id(parameter) in stepped and parameter.requires_grad
        yield from _part(MASTER if trained else PARAM, name, parameter)
        for kind, value in (engine.optimizer.state.get(parameter) or {}).items() if trained else ():
            if isinstance(value, DTensor):
                yield from _part(kind, name, value)
    for name, buffer in named_buffers(engine.module):
        if buffer.numel() and (names is None or name in names):
            yield Fragment(BUFFER, name, 0, buffer.detach().reshape(-1))


def numbers(engine: Any, names: Collection[str] | None = None) -> Mapping[str, Mapping[str, Any]]:
    """What the optimizer keeps of each trained parameter besides tensors of its shape: name -> key -> value."""
    return {
        name: without_tensors({key: value for key, value in kept.items() if not isinstance(value, DTensor)})
        for name, parameter in _parameters(engine, names)
        if (kept := engine.optimizer.state.get(parameter)) is not None
    }


def _parameters(engine: Any, names: Collection[str] | None) -> Iterator[tuple[str, DTensor]]:
    reshard(engine.module)
    found = ((name, p) for name, p in named_parameters(engine.module) if names is None or name in names)
    return cast("Iterator[tuple[str, DTensor]]", found)


def _part(kind: str, name: str, tensor: DTensor) -> Iterator[Fragment]:
    local: torch.Tensor = tensor._local_tensor.detach().reshape(-1)
    if local.numel():
        yield Fragment(kind, name, _start(tensor), local)


def _start(tensor: DTensor) -> int:
    """Of the local part in the slice that this rank's lane has, which is the whole tensor where there is one lane."""
    mesh = tensor.device_mesh
    # All that torch's rule looks at, and not the mesh, whose groups end with their generation.
    place = (mesh.shape, mesh.mesh_dim_names, tuple(mesh.get_coordinate() or ()))
    key = (tensor.shape, tensor.placements, *place)
    if key not in _starts:
        if len(_starts) >= _MAX_STARTS:
            _starts.clear()
        _starts[key] = _computed_start(tensor)
    return _starts[key]


def _computed_start(tensor: DTensor) -> int:
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    shape, begin = tuple(tensor.shape), (0,) * tensor.dim()
    if "tp" in (mesh.mesh_dim_names or ()):
        own: list[Placement] = [Replicate()] * mesh.ndim
        own[axis_of_cell(tensor)] = over_cell(tensor)
        shape, begin = compute_local_shape_and_global_offset(tensor.shape, mesh, own)
    return sum((o - b) * math.prod(shape[dim + 1 :]) for dim, (o, b) in enumerate(zip(offset, begin, strict=True)))

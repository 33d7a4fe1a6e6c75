"""torch's device meshes of one generation: cells of ranks that share layers (`tp`), and their lanes (`dp`), in which
several groups of ranks may have all of the model each.

A parameter that the tensor-parallel plan cuts or replicates is a DTensor over both axes, every other one over `dp`
alone. What a rank's lane holds of a parameter is its *slice*, which `fully_shard` cuts by rows over the lane.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import _random as tensor_random
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor._sharding_prop import LocalLRUCache

from elastic.core.mesh import Mesh
from elastic.core.sharding.cuts import Cut

# torchtitan's names of the two axes.
COPIES, SHARD = "dp_replicate", "dp_shard"
# The ranks with the same experts, and those that share all of them.
SAME_EXPERTS, EXPERTS = "edp", "ep"


@dataclass(frozen=True)
class Meshes:
    """`dp`: the ranks with the same slices and layers as this one. `tp`: those that share each layer with it; None
    where none do. `pp`: those of its pipeline, in the order of the stages; None where the model is no pipeline.
    `hybrid`: the ranks of `dp` as groups (axis 1) that have the model once each, by copies of the same shard (axis 0);
    None where all of them have it once together. `experts`: the ranks of a stage as groups of which each has its
    experts once (the axis `ep`, before it `tp` where ranks share layers, too), by ranks with the same ones (before
    these), and by copies of their shards (axis 0) where there are; None where every rank has all. `exchange`: the group
    of them that this rank is in. `stage`: all ranks with the same layers, whatever slices of them they have."""

    dp: DeviceMesh
    tp: DeviceMesh | None = None
    pp: dist.ProcessGroup | None = None
    hybrid: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    exchange: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None

    @property
    def sharded(self) -> DeviceMesh:
        """For `fully_shard`."""
        return self.dp if self.hybrid is None else self.hybrid

    @property
    def shards(self) -> DeviceMesh:
        """The ranks that have what this lane has once between them."""
        return self.dp if self.hybrid is None else self.hybrid[SHARD]

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks with the same shard as this one; None where no other has it."""
        return None if self.hybrid is None else self.hybrid[COPIES].get_group()

    @property
    def lanes(self) -> int:
        """How many data-parallel worlds hold parts of the model."""
        return (1 if self.tp is None else self.tp.size()) * (1 if self.pp is None else self.pp.size())

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        meshes = (self.sharded, self.tp)
        return [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]

    def holds(self, parameter: torch.Tensor) -> bool:
        """Is it a DTensor of this generation? torch compares meshes without their groups and ranks."""
        if not isinstance(parameter, DTensor):
            return False
        found, own = parameter.device_mesh.get_all_groups(), self.groups
        if is_experts(parameter):
            own = [] if self.experts is None else self.experts.get_all_groups()
        return bool(own) and all(one is other for one, other in zip(found, own, strict=False))


def make_meshes(
    device: torch.device,
    cell: dist.ProcessGroup | None,
    stages: Mesh | None = None,
    shard_workers: int | None = None,
    experts: Mesh | None = None,
) -> Meshes:
    """Over all ranks. `cell`: the neighbouring ranks that share each layer, this one among them; None: none do.
    `stages`: the ranks as a grid, of whom some share the layers; None: the model is no pipeline. `shard_workers`: so
    many neighbouring ranks of a stage, whole cells, have its layers once, where it has several times as many.
    `experts`: the ranks as a grid, of whom some share the experts of their stage, here or in other generations; None:
    none do. Collective where ranks share or have copies.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None, "the generation has no process group"
    forget_meshes()
    tp = 1 if cell is None else cell.size()
    ranks = torch.arange(dist.get_world_size()) if stages is None else _of_own_stage(stages)
    at, cells = int((ranks == rank).nonzero()), [] if cell is None else [cell]
    own, pipeline, stage = world, None, world
    if cell is not None or stages is not None:
        # Known to its members alone: thousands of lanes are not made on every rank.
        own = dist.new_group(ranks[at % tp :: tp].tolist(), use_local_synchronization=True)
    if stages is not None:
        pipeline = dist.new_group(list(stages.along("pp", rank)), use_local_synchronization=True)
        stage = own if tp == 1 else dist.new_group(ranks.tolist(), use_local_synchronization=True)
    if shard_workers is not None and shard_workers < ranks.numel() and ranks.numel() % shard_workers == 0:
        dp = DeviceMesh.from_group(own, device.type, mesh_dim_names=("dp",))
        grid = ranks.view(-1, shard_workers // tp, tp)
        whole = _whole(device, [*_copies(grid), *cells], grid)
        meshes = Meshes(dp, None if cell is None else whole["tp"], pipeline, whole[COPIES, SHARD])
    else:
        whole = _whole(device, [own, *cells], ranks.view(-1, tp))
        meshes = Meshes(whole["dp"], None if cell is None else whole["tp"], pipeline)
    return _with_experts(device, replace(meshes, stage=stage), cell, experts)


def _with_experts(device: torch.device, meshes: Meshes, cell: dist.ProcessGroup | None, mesh: Mesh | None) -> Meshes:
    """A layer's experts are cut over the ranks that share layers, with `ep` 1, too, and each part over `ep` data
    coordinates of their stage: a rank's slices are those of its lane whatever `ep`. Each copy of the stage has all."""
    if mesh is None or max(mesh.ep, mesh.tp) == 1:
        return meshes
    copies = [] if meshes.copies is None else [meshes.copies]
    ranks = _of_own_stage(mesh).view(meshes.copies.size() if meshes.copies else 1, -1, mesh.ep, mesh.sp, mesh.tp)
    copy, group, expert, part, slice_ = (int(where) for where in (ranks == dist.get_rank()).nonzero()[0])
    same = dist.new_group(ranks[copy, :, expert, :, slice_].flatten().tolist(), use_local_synchronization=True)
    row = dist.new_group(ranks[copy, group, :, part, slice_].tolist(), use_local_synchronization=True)
    # Those that have the experts once: beside each other in this order, whatever part of them each has.
    exchange = row if cell is None else cell
    if cell is not None and mesh.ep > 1:
        exchange = dist.new_group(ranks[copy, group, :, part].flatten().tolist(), use_local_synchronization=True)
    cells = [] if cell is None else [cell]
    names = (*([COPIES] if copies else []), SAME_EXPERTS, *(["tp"] if cells else []), EXPERTS)
    sizes = (*(each.size() for each in copies), -1, *(each.size() for each in cells), mesh.ep)
    grid = ranks.permute(0, 1, 3, 4, 2).reshape(sizes)
    found = DeviceMesh.from_group([*copies, same, *cells, row], device.type, mesh=grid, mesh_dim_names=names)
    return replace(meshes, experts=found, exchange=exchange)


def _whole(device: torch.device, groups: list[dist.ProcessGroup], ranks: torch.Tensor) -> DeviceMesh:
    """Over all ranks of a stage. Without a group for the last axis of `ranks` nobody shares layers."""
    names = ("dp", "tp") if ranks.dim() == 2 else (COPIES, SHARD, "tp")
    ranks = ranks if len(groups) == ranks.dim() else ranks.squeeze(-1)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names[: len(groups)])


def _copies(grid: torch.Tensor) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Those with the same shard as this one, and those that have what its lane has once between them."""
    copy, shard, slice_ = (int(where) for where in (grid == dist.get_rank()).nonzero()[0])
    copies = dist.new_group(grid[:, shard, slice_].tolist(), use_local_synchronization=True)
    shards = dist.new_group(grid[copy, :, slice_].tolist(), use_local_synchronization=True)
    return copies, shards


def _of_own_stage(mesh: Mesh) -> torch.Tensor:
    """The ranks with the same layers as this one."""
    stage = mesh.stage(dist.get_rank())
    return torch.tensor([rank for rank in range(dist.get_world_size()) if mesh.stage(rank) == stage])


def is_over_cell(parameter: torch.Tensor) -> bool:
    """Does it lie over the ranks of a cell, as the plan has it, cut or not? Else each of them has it by itself."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def is_experts(parameter: torch.Tensor) -> bool:
    """Has this rank a part of a layer's experts of it?"""
    return isinstance(parameter, DTensor) and EXPERTS in (parameter.device_mesh.mesh_dim_names or ())


def over_cell(parameter: torch.Tensor) -> Placement:
    """How a parameter, sharded or before, lies over the ranks of a cell: Replicate, or Shard with the dimension."""
    if not is_over_cell(parameter):
        return Replicate()
    assert isinstance(parameter, DTensor)
    placement: Placement = parameter.placements[axis_of_cell(parameter)]
    return placement


def axis_of_cell(parameter: DTensor) -> int:
    """Asked for each parameter in each snapshot: `mesh["tp"]` would make a mesh each time, half a millisecond."""
    return (parameter.device_mesh.mesh_dim_names or ()).index("tp")


def slice_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of what one lane holds of it, all of its ranks together."""
    shape, placement = list(parameter.shape), over_cell(parameter)
    if isinstance(placement, Shard):
        assert isinstance(parameter, DTensor)
        shape[placement.dim] //= _cell_size(parameter)
    return tuple(shape)


def rows_of(parameter: DTensor, ranks: int, rank: int) -> tuple[int, int]:
    """The first row of what this rank's lane holds that the rank has, and the one after its last. `ranks`: over so many
    it is sharded, as which of them; of experts the layer's own mesh says it."""
    begin, rows, mesh = 0, slice_shape(parameter)[0], parameter.device_mesh
    if is_experts(parameter):
        rows //= mesh[EXPERTS].size()
        begin = rows * mesh[EXPERTS].get_local_rank()
        ranks, rank = mesh[SAME_EXPERTS].size(), mesh[SAME_EXPERTS].get_local_rank()
    block = -(-rows // ranks)
    return begin + min(rows, rank * block), begin + min(rows, (rank + 1) * block)


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Which part of it each rank of a cell has; None where all of them have it whole."""
    placement = over_cell(parameter)
    if not isinstance(placement, Shard):
        return None
    assert isinstance(parameter, DTensor)
    return Cut.evenly(placement.dim % parameter.dim(), parameter.shape, _cell_size(parameter))


def _cell_size(parameter: DTensor) -> int:
    return parameter.device_mesh.size(axis_of_cell(parameter))


def forget_meshes() -> None:
    """Clear torch's caches of shardings, which outlive engines and process groups.

    They hold meshes, and a mesh holds its process group: without this, a group's sockets stay open for the rest of the
    process. And a process that comes back with another rank, in a mesh of equal shape, would be given DTensors with the
    mesh of before and that rank's offsets: meshes are compared without their ranks and groups.
    """
    torch._C._clear_DTensor_sharding_propagator_cache()
    propagator = DTensor._op_dispatcher.sharding_propagator
    # One cache per thread: only a fresh one is without what autograd's threads have put there.
    fresh = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
    propagator.propagate_op_sharding = fresh
    clear_redistribute_planner_cache()
    # Made with the first mesh on a device that draws random numbers.
    tensor_random._rng_tracker = None
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            _clear_caches(module)


def compile_each_size() -> Callable[[], None]:
    """Until what is returned is called, torch.compile makes a graph for each size and none for any, in this thread:
    DTensors of two sizes that vary, rows and lengths, say, exceed torch 2.13's recursion depth
    (pytorch/pytorch#152963). What a script has told torch of its sizes itself (`dynamic=True`) holds."""
    config, before = torch._dynamo.config, torch._dynamo.config.automatic_dynamic_shapes
    config.automatic_dynamic_shapes = False

    def put_back() -> None:
        config.automatic_dynamic_shapes = before

    return put_back


def forget_compiled() -> None:
    """Drop what torch.compile has made in this process of layers that ranks share.

    Compiled graphs have the names of groups in them, and which slices this rank has, without guards for them. Guards
    and traced tensors outlive torch's reset, and each has a copy of its mesh: those are cut off from their groups.
    """
    torch._dynamo.reset()
    for held in gc.get_objects():
        if type(held) is DeviceMesh:
            held._pg_registry.clear()


def cut_off(meshes: Meshes) -> None:
    """From their groups, which are about to be destroyed: parameters keep their mesh until they are sharded anew."""
    for mesh in (meshes.dp, meshes.tp, meshes.hybrid, meshes.experts):
        if mesh is not None:
            for held in (mesh, mesh._get_root_mesh()):
                held._pg_registry.clear()


def _clear_caches(module: ModuleType) -> None:
    """Of its functions, and of its classes' methods."""
    held = list(vars(module).values())
    for kind in held:
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            held += [value.__func__ if isinstance(value, staticmethod) else value for value in vars(kind).values()]
    for value in held:
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()

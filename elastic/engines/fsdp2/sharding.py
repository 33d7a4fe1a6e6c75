"""A model and its optimizer, sharded by torch's `fully_shard` over all ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor._sharding_prop import LocalLRUCache

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.belongings import adopt, is_released
from elastic.engines.model.plain_names import named_parameters, plain


def shard_model(
    model: torch.nn.Module, options: Mapping[str, Any], device: torch.device, begins: bool = True
) -> DeviceMesh:
    """In place: parameters become DTensors, cut by rows over all ranks. Returns their mesh.

    Collective: all ranks begin with rank 0's buffers, and where the run `begins` with its parameters; else a restore
    follows. A model on which the user has called `fully_shard` keeps that sharding. One that was released gets the
    DTensors of before. Raises UsageError for a model that cannot be sharded, naming the parameter.
    """
    if isinstance(model, FSDPModule):
        return _mesh_of(model)
    again = is_released(model)
    if not again:
        _prepare(model, None if options["cpu_offload"] else device)
    _broadcast([*(model.parameters() if begins and not again else ()), *model.buffers()], device)
    mesh = _dp_mesh(device)
    policy = MixedPrecisionPolicy(_dtype(options["param_dtype"]), _dtype(options["reduce_dtype"]))
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if options["cpu_offload"] else OffloadPolicy()
    for part in units(model, options["shard"]):
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=options["reshard_after_forward"],
            mp_policy=policy,
            offload_policy=offload,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if again:
        adopt(model, torch.device("cpu") if options["cpu_offload"] else device)
    return mesh


def _prepare(model: torch.nn.Module, device: torch.device | None) -> None:
    for name, parameter in named_parameters(model):
        if parameter.is_meta:
            raise UsageError(f"parameter {name!r} is on the meta device; build the model on the CPU or its device")
        if parameter.dim() == 0:
            raise UsageError(f"parameter {name!r} has no dimension to shard; give it the shape (1,)")
        if isinstance(parameter, DTensor):
            raise UsageError(f"parameter {name!r} is a DTensor already; leave the sharding to elastic.initialize")
    if device is not None:
        model.to(device)


def units(model: torch.nn.Module, names: tuple[str, ...] | None) -> list[torch.nn.Module]:
    """The modules that are sharded each by itself, inner ones first. Raises UsageError for a class that is not there.

    A module that shares a parameter with another part of the model is left to the root, which gathers both.
    """
    found = _named(model, names) if names is not None else _usual(model)
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    kept = []
    for module in found:
        inside = {id(child) for child in module.modules()}
        if all(users[id(parameter)] <= inside for parameter in module.parameters()):
            kept.append(module)
    return list(reversed(kept))


def reshard(model: torch.nn.Module) -> None:
    """Free what forward passes have gathered: the module has its sharded parameters afterwards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters by name, as forward passes use them: where they are sharded, the gathered one, which is the
    same object in every pass once there was a first."""
    found: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in named_parameters(model)
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    }
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    for sharded in (parameter for group in groups for parameter in group.fsdp_params):
        if sharded.sharded_param.requires_grad:
            found[plain(str(sharded._param_fqn))] = sharded.unsharded_param
    return found


def repoint(optimizer: torch.optim.Optimizer, old: Mapping[int, str], new: Mapping[str, torch.nn.Parameter]) -> None:
    """Give an optimizer that was made before the sharding the sharded parameters; its groups stay the same dicts.

    `old`: id of each parameter that the model had -> its name. Raises UsageError for an optimizer that has begun, and
    for parameters that are not the model's.
    """
    if any(optimizer.state.values()):
        raise UsageError("the optimizer has made steps already; pass it to elastic.initialize before its first one")
    held = {id(parameter) for parameter in new.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in held:
                continue
            if id(parameter) not in old:
                raise UsageError(
                    f"the optimizer's group {number} has a parameter at place {place} that the model does not have"
                )
            group["params"][place] = new[old[id(parameter)]]


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
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            _clear_caches(module)


def _clear_caches(module: ModuleType) -> None:
    """Of its functions, and of its classes' methods."""
    held = list(vars(module).values())
    for kind in held:
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            held += [value.__func__ if isinstance(value, staticmethod) else value for value in vars(kind).values()]
    for value in held:
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def _dp_mesh(device: torch.device) -> DeviceMesh:
    """One dimension over all ranks, on the world group."""
    group = dist.group.WORLD
    assert group is not None, "the generation has no process group"
    forget_meshes()
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))


def _mesh_of(model: torch.nn.Module) -> DeviceMesh:
    for name, parameter in named_parameters(model):
        if not isinstance(parameter, DTensor):
            raise UsageError(f"parameter {name!r} is not sharded: call fully_shard on the whole model, or not at all")
        if parameter.placements != (Shard(0),) or parameter.device_mesh.size() != dist.get_world_size():
            raise UsageError(
                f"parameter {name!r} is placed {parameter.placements} on a mesh of {parameter.device_mesh.shape}; only "
                f"rows over all {dist.get_world_size()} ranks can be carried to another world size"
            )
        mesh = parameter.device_mesh
    return mesh


def _named(model: torch.nn.Module, names: tuple[str, ...]) -> list[torch.nn.Module]:
    found = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    missing = set(names) - {type(module).__name__ for module in found}
    if missing:
        raise UsageError(f"fsdp2: shard names {sorted(missing)}, but the model has no module of that class")
    return found


def _usual(model: torch.nn.Module) -> list[torch.nn.Module]:
    declared = tuple(getattr(model, "_no_split_modules", None) or ())
    if declared:
        return [module for module in model.modules() if type(module).__name__ in declared and module is not model]
    return list(_list_elements(model))


def _list_elements(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The elements of the outermost ModuleLists."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from (element for element in child if any(True for _ in element.parameters()))
        else:
            yield from _list_elements(child)


@torch.no_grad()
def _broadcast(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """As DistributedDataParallel and DeepSpeed do. Ranks that were seeded differently would train a mixture."""
    for tensor in tensors:
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

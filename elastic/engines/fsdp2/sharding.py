"""A model and its optimizer, sharded by torch's `fully_shard` over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh
from elastic.engines.fsdp2 import deferred
from elastic.engines.fsdp2.belongings import adopt, gather_to_generate, is_released, parameter_groups
from elastic.engines.fsdp2.experts import share
from elastic.engines.fsdp2.layers.tensor_parallel import Plan, apply
from elastic.engines.fsdp2.meshes import COPIES, EXPERTS, SAME_EXPERTS, Meshes, make_meshes
from elastic.engines.model.plain_names import named_parameters, plain


@dataclass(frozen=True)
class _FirstGroups:
    """What an optimizer was given: `of` the parameters that the model had, the names of those in each group, those of
    other stages included, and by name what the optimizer has marked them with in its state."""

    of: Mapping[int, str]
    names: list[list[str]]
    marks: Mapping[str, Mapping[Any, Any]]


_first_groups: WeakKeyDictionary[torch.optim.Optimizer, _FirstGroups] = WeakKeyDictionary()


def shard_model(
    model: torch.nn.Module,
    options: Mapping[str, Any],
    device: torch.device,
    begins: bool = True,
    plan: Plan | None = None,
    cell: dist.ProcessGroup | None = None,
    grid: Mesh | None = None,
    layers: Mapping[str, torch.nn.Module] | None = None,
) -> Meshes:
    """In place: parameters become DTensors, cut as `plan` says over the ranks of `cell`, and by rows over all others.
    `layers`: those whose experts ranks share, as `grid` has them, here or in other generations.

    Collective: all ranks begin with rank 0's buffers, and where the run `begins` with its parameters; else a
    restore follows. A model on which the user has called `fully_shard` keeps that sharding. One that was released
    gets the DTensors of before. One on the meta device is given values by its `init_weights`. Raises UsageError for
    a model that cannot be sharded, naming the parameter.
    """
    if isinstance(model, FSDPModule):
        if cell is not None:
            raise UsageError(
                "the script has called fully_shard itself, and mesh.tp cuts layers before that: leave fully_shard to "
                "elastic.initialize, and say in tp_plan how layers are cut"
            )
        if options["shard_workers"] is not None:
            raise UsageError(
                "the script has called fully_shard itself, and fsdp2.shard_workers says over which workers: leave one "
                "of them out"
            )
        if layers:
            raise UsageError(
                "the script has called fully_shard itself, and mesh.ep shares experts before that: leave fully_shard "
                "to elastic.initialize"
            )
        return Meshes(_mesh_of(model), stage=dist.group.WORLD)
    if not is_released(model):
        require_shardable(model)
    if not options["cpu_offload"]:
        move(model, device)
    first = FirstValues(model, device, begins)
    layers = layers or {}
    meshes = make_meshes(device, cell, None, options["shard_workers"], grid if layers else None)
    if meshes.tp is not None:
        assert plan is not None
        apply(plan, model, meshes.tp)
    share(layers, meshes)
    shard_units(model, options, meshes.sharded, device, list(layers.values()), meshes.experts)
    first.give(meshes, torch.device("cpu") if options["cpu_offload"] else device)
    return meshes


class FirstValues:
    """What a whole model has before a restore, or begins with: rank 0's buffers and, where the run `begins`, its
    parameters. Collective, and so is `give`.

    One that was sharded before has no values still; one on the meta device is given them by its `init_weights`. Ranks
    may differ in that. Raises UsageError for a model that cannot be sharded, naming the parameter.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, begins: bool) -> None:
        self._model, self._device, self._begins = model, device, begins
        again = is_released(model)
        self._absent = not again and deferred.is_deferred(model)
        self._adopts = again or self._absent
        if self._absent:
            deferred.begin(model, device)
        # Of rank 0, whose buffers have values later then.
        late = torch.tensor([float(self._absent)], device=device)
        broadcast([late], device)
        self._late = bool(late)
        if not self._late:
            # Before anything is sharded: where a peer is lost in it, the model can be given back once more.
            broadcast([*(model.parameters() if begins and not self._adopts else ()), *model.buffers()], device)
        self._received = [buffer.clone() for buffer in model.buffers()] if self._absent else []

    def give(self, meshes: Meshes, memory: torch.device, others: deferred.Others | None = None) -> None:
        """To the model, which is sharded; its shards lie in `memory`. `others`: layers that the rank does not have."""
        if self._adopts:
            adopt(self._model, memory)
        if self._absent:
            deferred.give_values(self._model, meshes, self._device, self._begins, others)
        with nullcontext() if others is None else others.present():
            if self._late:
                broadcast(self._model.buffers(), self._device)
            elif self._absent:
                for buffer, value in zip(self._model.buffers(), self._received, strict=True):
                    buffer.data.copy_(value)


def shard_units(
    model: torch.nn.Module,
    options: Mapping[str, Any],
    mesh: DeviceMesh,
    device: torch.device,
    layers: Sequence[torch.nn.Module] = (),
    experts: DeviceMesh | None = None,
) -> None:
    """`fully_shard` of the model and its units over `mesh`. `layers` are those whose experts are shared over the mesh
    `experts`, where there is one."""
    policy, offload = _policies(options, device)
    again = options["reshard_after_forward"]
    # Before any of them has torch's name for it.
    parts = units(model, options["shard"])
    if experts is not None:
        _shard_experts(layers, options, experts, device)
    for part in parts:
        if not isinstance(part, FSDPModule):
            fully_shard(part, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=offload)
    # The model's own answer alone: what follows a unit inside of it computes in `param_dtype`, too.
    own = replace(policy, output_dtype=_dtype(options["output_dtype"]))
    fully_shard(model, mesh=mesh, mp_policy=own, offload_policy=offload)
    gather_to_generate(model)


def _shard_experts(
    layers: Iterable[torch.nn.Module], options: Mapping[str, Any], mesh: DeviceMesh, device: torch.device
) -> None:
    """Each layer by itself, over the ranks with the same experts, of which there may be copies."""
    policy, offload = _policies(options, device)
    # A layer's inputs have their types already: where ranks do not share experts it need not be a unit.
    policy, again = replace(policy, cast_forward_inputs=False), options["reshard_after_forward"]
    own = mesh[COPIES, SAME_EXPERTS] if COPIES in (mesh.mesh_dim_names or ()) else mesh[SAME_EXPERTS]
    for layer in layers:
        unit = fully_shard(layer, mesh=own, reshard_after_forward=again, mp_policy=policy, offload_policy=offload)
        # The gradients of a rank's experts are sums over the ranks that share them, each row of a cell once; the mean
        # is over all ranks of a lane.
        lane = own.size() * mesh[EXPERTS].size()
        alone = mesh[SAME_EXPERTS].size() == 1
        kind = policy.reduce_dtype or policy.param_dtype or next(layer.parameters()).dtype
        # Where there is nobody to reduce with, copies aside, torch divides such types twice (_fsdp_collectives.py,
        # `foreach_reduce`, release 2.13).
        twice = alone and kind not in (torch.float32, torch.bfloat16)
        unit.set_gradient_divide_factor(lane ** (0.5 if twice else 1.0))
        # Else a factor asks the backend for an operation that NCCL alone has.
        unit.set_force_sum_reduction_for_comms(not alone)


def _policies(options: Mapping[str, Any], device: torch.device) -> tuple[MixedPrecisionPolicy, OffloadPolicy]:
    types = MixedPrecisionPolicy(
        _dtype(options["param_dtype"]),
        _dtype(options["reduce_dtype"]),
        cast_forward_inputs=options["cast_forward_inputs"],
    )
    return types, CPUOffloadPolicy(pin_memory=device.type != "cpu") if options["cpu_offload"] else OffloadPolicy()


def move(model: torch.nn.Module, device: torch.device) -> None:
    """What has values, as `Module.to` does it."""
    moves: Any = model
    moves._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def require_shardable(model: torch.nn.Module) -> None:
    for name, parameter in named_parameters(model):
        if parameter.dim() == 0:
            raise UsageError(f"parameter {name!r} has no dimension to shard; give it the shape (1,)")
        if isinstance(parameter, DTensor):
            raise UsageError(f"parameter {name!r} is a DTensor already; leave the sharding to elastic.initialize")


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
    for group in parameter_groups(model):
        # `FSDPModule.reshard` leaves the root alone where a forward pass has failed in its middle.
        group._to_sharded()


def summed_gradients(model: torch.nn.Module) -> dict[int, tuple[int, int]]:
    """Of each trained parameter, by its id: the elements of the gradient that is added up over a step's micro-batches
    on this rank, which is none of a shard, and the bytes of each (`FSDPParam.to_accumulated_grad_if_needed`)."""
    found = {}
    for group in parameter_groups(model):
        computed = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
        for each in group.fsdp_params:
            shard = each.sharded_param
            if shard.requires_grad:
                found[id(shard)] = each._orig_size.numel(), (computed or shard.dtype).itemsize
    return found


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters by name, as forward passes use them: where they are sharded, the gathered one, which is the
    same object in every pass once there was a first."""
    found: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in named_parameters(model)
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    }
    for sharded in (each for group in parameter_groups(model) for each in group.fsdp_params):
        # It has none before its first forward pass.
        if sharded.sharded_param.requires_grad and hasattr(sharded, "_unsharded_param"):
            found[plain(str(sharded._param_fqn))] = sharded.unsharded_param
    return found


def repoint(optimizer: torch.optim.Optimizer, old: Mapping[int, str], new: Mapping[str, torch.nn.Parameter]) -> None:
    """Give an optimizer that was made before the sharding the sharded parameters; its groups stay the same dicts.

    `old`: id of each parameter that the model had -> its name; of one model always the same object. Other stages'
    parameters are left out; where the rank has them in another generation they are in their groups again. Raises
    UsageError for an optimizer that has begun, and for parameters that are not the model's.
    """
    kept = [value for state in optimizer.state.values() for value in state.values()]
    if any(isinstance(value, torch.Tensor) for value in kept):
        raise UsageError("the optimizer has made steps already; pass it to elastic.initialize before its first one")
    first = _first_groups.get(optimizer)
    if first is None or first.of is not old:
        known = {**old, **{id(parameter): name for name, parameter in new.items()}}
        names = [
            [_name(parameter, known, number, place) for place, parameter in enumerate(group["params"])]
            for number, group in enumerate(optimizer.param_groups)
        ]
        marks = {known[id(parameter)]: dict(state) for parameter, state in optimizer.state.items() if state}
        first = _first_groups[optimizer] = _FirstGroups(old, names, marks)
    for group, whole in zip(optimizer.param_groups, first.names, strict=True):
        group["params"] = [new[name] for name in whole if name in new]
    optimizer.state.clear()
    optimizer.state.update({new[name]: dict(marks) for name, marks in first.marks.items() if name in new})


def _name(parameter: torch.Tensor, names: Mapping[int, str], group: int, place: int) -> str:
    if id(parameter) not in names:
        raise UsageError(f"the optimizer's group {group} has a parameter at place {place} that the model does not have")
    return names[id(parameter)]


def _mesh_of(model: torch.nn.Module) -> DeviceMesh:
    for name, parameter in named_parameters(model):
        if not isinstance(parameter, DTensor):
            raise UsageError(f"parameter {name!r} is not sharded: call fully_shard on the whole model, or not at all")
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device, and the script has called fully_shard itself: give it "
                "values before elastic.initialize (to_empty, init_weights), or leave fully_shard out"
            )
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
    """The elements of the outermost ModuleLists, and of ModuleDicts whose keys are numbers (torchtitan's layers)."""
    for child in module.children():
        numbered = isinstance(child, torch.nn.ModuleDict) and all(map(str.isdecimal, child))
        if numbered or isinstance(child, torch.nn.ModuleList):
            yield from (element for element in child.children() if any(True for _ in element.parameters()))
        else:
            yield from _list_elements(child)


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Rank 0's values, as DistributedDataParallel and DeepSpeed do it. Ranks that were seeded differently would train a
    mixture."""
    for tensor in tensors:
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

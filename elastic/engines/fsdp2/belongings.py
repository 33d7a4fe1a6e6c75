"""A model under `fully_shard` that is sharded again, over other ranks, in the same process.

Modules and sharded parameters stay the same objects: the user's loop, optimizer and averages hold them. torch has no
way back from `fully_shard`; release 2.13 keeps handles of all hooks that it registers, and what else it leaves on a
module is undone here (torch/distributed/fsdp/_fully_shard/_fully_shard.py, _fsdp_init.py, _fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from elastic.engines.fsdp2 import experts
from elastic.engines.fsdp2.layers import tensor_parallel
from elastic.engines.model.plain_names import named_parameters

# What `fully_shard` marks modules with, for torch.compile.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")

# Sharded parameters by name, of models that belong to no process group at present.
_released: WeakKeyDictionary[nn.Module, Mapping[str, DTensor]] = WeakKeyDictionary()
# Of others: those of layers that the rank has had and has no more.
_elsewhere: WeakKeyDictionary[nn.Module, Mapping[str, DTensor]] = WeakKeyDictionary()

# Models whose `generate` gathers what the root has.
_generating: WeakSet[nn.Module] = WeakSet()


class Belongings:
    """The user's model and optimizer, to be given back when the engine on them ends. Made once the model is sharded,
    and before a scheduler is made."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._groups = [(group, _copied(group)) for group in optimizer.param_groups]

    def give_back(self) -> None:
        """Values are not kept: a restore follows. Hyper-parameters are as they were: schedulers begin from them."""
        release(self._model)
        self._optimizer.state.clear()
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, copied in self._groups:
            group.clear()
            group.update(_copied(copied))


def is_released(model: nn.Module) -> bool:
    return model in _released


def gather_to_generate(model: nn.Module) -> None:
    """An encoder and a decoder are called by `generate` itself, and not in a pass of the model, where what both share
    would be gathered."""
    if callable(getattr(type(model), "generate", None)) and "generate" not in vars(model):
        register_fsdp_forward_method(model, "generate")
        _generating.add(model)


def release(model: nn.Module) -> None:
    """Undo `fully_shard`: the model has parameters on the meta device, and no values, until it is sharded again.

    The sharded parameters, which others hold, have neither values nor a mesh meanwhile: a mesh holds its process group.
    """
    for module in list(model.modules()):
        if isinstance(module, FSDPModule):
            _undo(module)
        for mark in _MARKS:
            vars(module).pop(mark, None)
    if model in _generating:
        _generating.discard(model)
        vars(model).pop("generate", None)
    tensor_parallel.undo(model)
    experts.undo(model)
    sharded = {name: tensor for name, tensor in named_parameters(model) if isinstance(tensor, DTensor)}
    stand_ins = {
        id(tensor): nn.Parameter(
            torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), requires_grad=tensor.requires_grad
        )
        for tensor in sharded.values()
    }
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) in stand_ins:
                module._parameters[name] = stand_ins[id(tensor)]
    for tensor in sharded.values():
        held: Any = tensor
        held.grad = held._spec = None
        held._local_tensor = torch.empty(0, dtype=tensor._local_tensor.dtype)
    # Where building has failed, what it had not come to is there still.
    _released[model] = {**_elsewhere.pop(model, {}), **sharded, **_released.get(model, {})}


@contextmanager
def released_if_it_fails(model: nn.Module) -> Iterator[None]:
    """Around what shards a model: one that was released is so again where a peer is lost meanwhile, or this fails."""
    again = is_released(model)
    try:
        yield
    except BaseException:
        if again:
            release(model)
        raise


def adopt(model: nn.Module, device: torch.device) -> None:
    """After `fully_shard` of a model on the meta device: its shards have memory but no values. A released model has the
    sharded parameters of before, in the place of the new ones, as far as it had them. `device`: where shards lie."""
    before = dict(_released.pop(model, {}))
    names = {id(tensor): name for name, tensor in named_parameters(model)}
    for made in (each for group in parameter_groups(model) for each in group.fsdp_params):
        new = made.sharded_param
        padded = torch.zeros(
            made.padded_sharded_param_size, dtype=new.dtype, device=device, pin_memory=bool(made.pin_memory)
        )
        local = padded.narrow(0, 0, new._local_tensor.shape[0])
        kept: Any = before.pop(names[id(new)], None)
        if kept is None:
            kept = nn.Parameter(made.to_sharded_dtensor(local), requires_grad=new.requires_grad)
        else:
            kept._local_tensor, kept._spec = local, new._spec
        made._sharded_param_data = padded.view(-1)
        made.sharded_param = kept
        made._setattr_on_modules(kept)
    _elsewhere[model] = before


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """torch's `FSDPParamGroup`s."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _undo(module: FSDPModule) -> None:
    state: Any = module._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    owner: Any = module
    _module_state_mapping.pop(owner, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        held = vars(owner)[key]
        for api in [api for api in held if getattr(api, "__name__", api) == "fully_shard"]:
            del held[api]
        if not held:
            del vars(owner)[key]
    # (FSDPModule, the class of before)
    owner.__class__ = type(owner).__bases__[1]
    # The graph of a loss that the user's loop still has holds these, and they the mesh.
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            vars(parameter).clear()
        vars(group).clear()
    vars(state).clear()


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": list(group["params"])}

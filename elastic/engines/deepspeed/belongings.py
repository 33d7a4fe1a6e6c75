"""The user's model and optimizer as they were before DeepSpeed changed them: another engine can then be built on them.

DeepSpeed 0.19.8 marks parameters and modules with attributes, replaces the modules' parameter dictionaries (stage 3),
registers hooks that its `destroy` leaves behind, and puts its flat partitions into the optimizer's groups. All of this
is undone; what the user has added since the engine was built stays. Values are not kept: a restore follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.engines.deepspeed.experts.native import is_bound
from elastic.engines.deepspeed.experts.placement import is_replaced

# Attributes that DeepSpeed sets only after an engine is built, besides those that begin with `ds_`.
_SET_LATER = frozenset(
    {"_hp_mapping", "_external_params", "_original_parameters", "_z3_optimizer", "all_parameters",
     "applied_pre_backward_ref_cnt", "grad_accum", "is_external_param", "post_bwd_fn", "pre_bwd_fn"}
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_OPTIONS = ("_with_kwargs", "_always_called")


class Belongings:
    """Call order: 1. made before `deepspeed.initialize` 2. `built` after it 3. `give_back` when the engine is
    destroyed; or `failed` instead of both."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._groups = [] if self._optimizer is None else [(g, _copied(g)) for g in self._optimizer.param_groups]
        self._names, self._hooks = _names(model), _hooks(model)
        self._gradient_hooks = {
            id(parameter): frozenset(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()
        }
        self._shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
        # What DeepSpeed has added, by the object's id.
        self._added: dict[int, frozenset[str]] = {}
        self._added_hooks: dict[int, frozenset[int]] = {}
        self._engine_hooks: frozenset[int] = frozenset()

    def built(self, native: nn.Module) -> None:
        self._engine_hooks = _hooks_of(native)
        self._compare()

    def failed(self) -> None:
        """The engine could not be built: `give_back` of what there is of it."""
        self._compare()
        for parameter in self._model.parameters():
            hooks = parameter._post_accumulate_grad_hooks
            for number in set(hooks or ()) - self._gradient_hooks.get(id(parameter), frozenset()):
                del hooks[number]
        self.give_back()

    def _compare(self) -> None:
        none: frozenset[Any] = frozenset()
        self._added = {key: names - self._names.get(key, none) for key, names in _names(self._model).items()}
        self._added_hooks = {key: hooks - self._hooks.get(key, none) for key, hooks in _hooks(self._model).items()}

    def obstacle(self, native: nn.Module) -> str | None:
        """Why no other engine can be built on this model; None where one can."""
        if self._partitioned:
            return "the model was built under deepspeed.zero.Init, which binds its parameters to one world size"
        if getattr(self._model, "ds_autotp_parsed", False):
            return "tensor parallelism has replaced the model's layers by slices of them, which cannot be undone"
        if is_bound(self._model):
            return "the model's MoE layers have the groups of one generation, which cannot be undone"
        if is_replaced(self._model):
            return "expert parallelism has replaced the model's experts by a share of them, which cannot be undone"
        if native.module is not self._model:
            return f"DeepSpeed has wrapped the model in a {type(native.module).__name__}"
        if _hooks_of(native) - self._engine_hooks:
            return "hooks were registered on the engine; register them on the model, which stays"
        return None

    def give_back(self) -> None:
        for module in self._model.modules():
            self._clean_module(module)
        for parameter in self._model.parameters():
            self._clean_parameter(parameter)
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.param_groups[:] = [group for group, _ in self._groups]
            for group, copied in self._groups:
                group.clear()
                group.update(_copied(copied))

    def _clean_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        if "_original_parameters" in attributes:
            module._parameters = dict(module._parameters.items())
        for hooks in _HOOKS:
            for number in self._added_hooks.get(id(module), frozenset()) & attributes[hooks].keys():
                del attributes[hooks][number]
                for option in _HOOK_OPTIONS:
                    attributes.get(hooks + option, {}).pop(number, None)
        self._remove_added(module)

    def _clean_parameter(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        self._remove_added(parameter)
        shape = self._shapes.get(id(parameter), parameter.shape)
        if parameter.shape != shape:
            # Stage 3 keeps a part only. A placeholder of the whole shape takes no memory: see `fill_placeholders`.
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(shape)

    def _remove_added(self, owner: Any) -> None:
        before, added = self._names.get(id(owner), frozenset()), self._added.get(id(owner), frozenset())
        for name in vars(owner).keys() - before:
            if name in added or name in _SET_LATER or name.startswith("ds_"):
                del vars(owner)[name]


def fill_placeholders(model: nn.Module) -> None:
    """Memory for parameters that have none since `give_back`."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and not any(parameter.stride()):
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": list(group["params"])}


def _names(model: nn.Module) -> dict[int, frozenset[str]]:
    return {id(owner): frozenset(vars(owner)) for owner in (*model.modules(), *model.parameters())}


def _hooks(model: nn.Module) -> dict[int, frozenset[int]]:
    return {id(module): _hooks_of(module) for module in model.modules()}


def _hooks_of(module: nn.Module) -> frozenset[int]:
    return frozenset(number for hooks in _HOOKS for number in vars(module)[hooks])

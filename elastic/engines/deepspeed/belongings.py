"""The user's model and optimizer as they were before DeepSpeed changed them: another engine can then be built on them.

DeepSpeed 0.19.8 marks parameters and modules with attributes, replaces the modules' parameter dictionaries (stage 3),
registers hooks that its `destroy` leaves behind, and puts its flat partitions into the optimizer's groups. Where ranks
share layers it puts modules of its own into their places, and divides numbers of heads and widths in the others. All of
this is undone; what the user has added since the engine was built stays. Values are not kept: a restore follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic.engines.deepspeed.experts.native import is_bound
from elastic.engines.deepspeed.experts.placement import is_replaced
from elastic.engines.model.placeholders import is_placeholder, placeholder, renew_accumulator

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
        self._structure = Structure(model)
        # Kept: those whose places are taken are in no model, and ids are of what there is.
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._names, self._hooks = self._all_names(), self._all_hooks()
        self._gradient_hooks = {
            id(parameter): frozenset(parameter._post_accumulate_grad_hooks or ()) for parameter in self._parameters
        }
        self._tensor_hooks = {id(parameter): _tensor_hooks_of(parameter) for parameter in self._parameters}
        self._shapes = {id(parameter): parameter.shape for parameter in self._parameters}
        # What DeepSpeed has added, by the object's id.
        self._added: dict[int, frozenset[str]] = {}
        self._added_hooks: dict[int, frozenset[int]] = {}
        self._added_tensor_hooks: dict[int, frozenset[int]] = {}
        self._engine_hooks: frozenset[int] = frozenset()

    def built(self, native: nn.Module) -> None:
        self._engine_hooks = _hooks_of(native)
        self._compare()

    def failed(self) -> None:
        """The engine could not be built: `give_back` of what there is of it."""
        self._compare()
        for parameter in self._parameters:
            hooks = parameter._post_accumulate_grad_hooks
            for number in set(hooks or ()) - self._gradient_hooks.get(id(parameter), frozenset()):
                del hooks[number]
        self.give_back()

    def _compare(self) -> None:
        self._structure.built()
        self._added = {key: names - self._names[key] for key, names in self._all_names().items()}
        self._added_hooks = {key: hooks - self._hooks[key] for key, hooks in self._all_hooks().items()}
        for parameter in self._parameters:
            added = _tensor_hooks_of(parameter) - self._tensor_hooks[id(parameter)]
            self._added_tensor_hooks[id(parameter)] = added

    def obstacle(self, native: nn.Module) -> str | None:
        """Why no other engine can be built on this model; None where one can."""
        if self._partitioned:
            return "the model was built under deepspeed.zero.Init, which binds its parameters to one world size"
        if is_bound(self._model):
            return "the model's MoE layers have the groups of one generation, which cannot be undone"
        if is_replaced(self._model):
            return "expert parallelism has replaced the model's experts by a share of them, which cannot be undone"
        if native.module is not self._model:
            return f"DeepSpeed has wrapped the model in a {type(native.module).__name__}"
        if _hooks_of(native) - self._engine_hooks:
            return "hooks were registered on the engine; register them on the model, which stays"
        return self._structure.obstacle()

    def give_back(self) -> None:
        self._structure.give_back()
        for module in self._modules:
            self._clean_module(module)
        for parameter in self._parameters:
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
        for number in self._added_tensor_hooks.get(id(parameter), frozenset()):
            (parameter._backward_hooks or {}).pop(number, None)
        shape = self._shapes[id(parameter)]
        if parameter.shape != shape:
            # A part of it is here.
            parameter.data = placeholder(parameter, shape)
            renew_accumulator(parameter)

    def _all_names(self) -> dict[int, frozenset[str]]:
        return {id(owner): frozenset(vars(owner)) for owner in (*self._modules, *self._parameters)}

    def _all_hooks(self) -> dict[int, frozenset[int]]:
        return {id(module): _hooks_of(module) for module in self._modules}

    def _remove_added(self, owner: Any) -> None:
        before, added = self._names[id(owner)], self._added.get(id(owner), frozenset())
        for name in vars(owner).keys() - before:
            if name in added or _is_set_later(name):
                del vars(owner)[name]


@dataclass(frozen=True)
class _Place:
    """One name in a module's dictionary of modules, of parameters, or of plain attributes, and what is there."""

    owner: nn.Module
    among: str
    name: str
    value: Any

    @property
    def now(self) -> Any:
        return _dictionary(self.owner, self.among).get(self.name)

    def put(self) -> None:
        _dictionary(self.owner, self.among)[self.name] = self.value


class Structure:
    """Which modules, parameters and numbers a model is made of, and what DeepSpeed puts into their places.

    Call order: 1. made before the engine is built 2. `built` after it 3. `obstacle`, then `give_back`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._before = [place for module in self._modules for place in _places(module)]
        # What was there and what is there instead.
        self._taken: list[tuple[_Place, _Place]] = []
        # Of DeepSpeed's modules: what they had when the engine was built.
        self._had: list[tuple[nn.Module, frozenset[str], frozenset[int]]] = []

    def built(self) -> None:
        unlike = [place for place in self._before if place.now is not place.value]
        self._taken = [(place, _Place(place.owner, place.among, place.name, place.now)) for place in unlike]
        own = {id(module) for module in self._modules}
        foreign = (module for module in self._model.modules() if id(module) not in own)
        self._had = [(module, frozenset(vars(module)), _hooks_of(module)) for module in foreign]

    def obstacle(self) -> str | None:
        """Why what is in the model now cannot be taken out of it again; None where it can."""
        for module, names, hooks in self._had:
            added = frozenset(vars(module)) - names
            if not all(map(_is_set_later, added)) or _hooks_of(module) - hooks:
                return (
                    f"hooks or attributes were put on a {type(module).__name__}, which DeepSpeed has made for a layer "
                    "of the model and makes anew with each generation; put them on the module around it, which stays"
                )
        for before, after in self._taken:
            if before.among == _MODULES and after.now is not after.value:
                return f"the model has another {before.name!r} than the one that DeepSpeed has made for it"
        return None

    def give_back(self) -> None:
        for before, after in self._taken:
            if after.now is not after.value:
                continue
            if before.among == _MODULES and isinstance(after.value, nn.Module):
                # What the loop has said of the whole model since.
                before.value.train(after.value.training)
            before.put()
        self._had.clear()


_MODULES, _PARAMETERS, _PLAIN = "_modules", "_parameters", "__dict__"


def _dictionary(owner: nn.Module, among: str) -> dict[str, Any]:
    return vars(owner) if among == _PLAIN else vars(owner)[among]


def _places(module: nn.Module) -> Iterator[_Place]:
    for among in (_MODULES, _PARAMETERS):
        yield from (_Place(module, among, name, value) for name, value in _dictionary(module, among).items())
    numbers = ((name, value) for name, value in vars(module).items() if type(value) is int)
    yield from (_Place(module, _PLAIN, name, value) for name, value in numbers)


def fill_placeholders(model: nn.Module) -> None:
    """Memory for parameters that have none since `give_back`."""
    for parameter in model.parameters():
        if is_placeholder(parameter):
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _is_set_later(name: str) -> bool:
    return name in _SET_LATER or name.startswith("ds_")


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": list(group["params"])}


def _hooks_of(module: nn.Module) -> frozenset[int]:
    return frozenset(number for hooks in _HOOKS for number in vars(module)[hooks])


def _tensor_hooks_of(parameter: torch.Tensor) -> frozenset[int]:
    return frozenset(parameter._backward_hooks or ())

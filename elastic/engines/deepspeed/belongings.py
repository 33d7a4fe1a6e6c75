"""The user's model and optimizer as they were before DeepSpeed changed them: another engine can then be built on them.

DeepSpeed 0.19.8 marks parameters and modules with attributes, replaces the modules' parameter dictionaries (stage 3),
registers hooks that its `destroy` leaves behind, and puts its flat partitions into the optimizer's groups. Where ranks
share layers or experts it makes modules in their places (`layers.replaced`). All of this is undone; what the user has
added since the engine was built stays. Values are not kept: a restore follows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from elastic.engines.base import UserObjects
from elastic.engines.deepspeed.experts import native_placed
from elastic.engines.deepspeed.experts.native import unbind
from elastic.engines.deepspeed.layers.replaced import Replaced, hooks_of, is_set_later, remove_hooks
from elastic.engines.model.placeholders import placeholder, renew_accumulator


class Belongings:
    """Call order: 1. made before `deepspeed.initialize` 2. `keeping_objects` while it works 3. `built` after it
    4. `give_back` when the engine is destroyed; or `failed` instead of both."""

    def __init__(self, model: nn.Module, objects: UserObjects, shares_change: bool = False) -> None:
        """`shares_change`: may another number of ranks share the experts in another generation?"""
        self._model, optimizer = model, objects.optimizer
        # As they are now; which parameters the optimizer has, DeepSpeed changes.
        self._place_again = native_placed.obstacle(model, objects) if shares_change else None
        self._shares_change = shares_change
        self._partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._groups = [] if self._optimizer is None else [(g, _copied(g)) for g in self._optimizer.param_groups]
        self._replaced = Replaced(model)
        # Kept: those whose places are taken are in no model, and ids are of what there is.
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._names, self._hooks = self._all_names(), self._all_hooks()
        self._shapes = {id(parameter): parameter.shape for parameter in self._parameters}
        # What DeepSpeed has added, by the object's id.
        self._added: dict[int, frozenset[str]] = {}
        self._added_hooks: dict[int, frozenset[int]] = {}
        self._engine_hooks: frozenset[int] = frozenset()

    def keeping_objects(self) -> AbstractContextManager[None]:
        """While DeepSpeed builds an engine: what it makes in the places of layers are the objects of before."""
        return self._replaced.keeping_objects()

    def require_kept(self) -> None:
        """Raises UsageError where something of the script's is on none of the engine's layers."""
        self._replaced.require_kept()

    def built(self, native: nn.Module) -> None:
        self._engine_hooks = hooks_of(native)
        self._compare()

    def failed(self) -> None:
        """The engine could not be built: `give_back` of what there is of it."""
        self._compare()
        self.give_back()

    def _compare(self) -> None:
        self._replaced.built()
        self._added = {key: names - self._names[key] for key, names in self._all_names().items()}
        self._added_hooks = {key: hooks - self._hooks[key] for key, hooks in self._all_hooks().items()}

    def obstacle(self, native: nn.Module) -> str | None:
        """Why no other engine can be built on this model; None where one can."""
        if self._partitioned:
            return "the model was built under deepspeed.zero.Init, which binds its parameters to one world size"
        if self._shares_change:
            why = self._place_again or native_placed.changed(self._model, self._hooks_of_script)
            if why is not None:
                return why
        if native.module is not self._model:
            return f"DeepSpeed has wrapped the model in a {type(native.module).__name__}"
        if hooks_of(native) - self._engine_hooks:
            return "hooks were registered on the engine; register them on the model, which stays"
        return self._replaced.obstacle()

    def _hooks_of_script(self, owner: Any) -> frozenset[int]:
        return hooks_of(owner) - self._added_hooks.get(id(owner), frozenset())

    def give_back(self) -> None:
        self._replaced.give_back()
        unbind(self._model)
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
        if "_original_parameters" in vars(module):
            module._parameters = dict(module._parameters.items())
        remove_hooks(module, self._added_hooks.get(id(module), frozenset()))
        self._remove_added(module)

    def _clean_parameter(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        self._remove_added(parameter)
        remove_hooks(parameter, self._added_hooks.get(id(parameter), frozenset()))
        shape = self._shapes[id(parameter)]
        if parameter.shape != shape:
            # A part of it is here.
            parameter.data = placeholder(parameter, shape)
            renew_accumulator(parameter)

    def _all_names(self) -> dict[int, frozenset[str]]:
        return {id(owner): frozenset(vars(owner)) for owner in (*self._modules, *self._parameters)}

    def _all_hooks(self) -> dict[int, frozenset[int]]:
        return {id(owner): hooks_of(owner) for owner in (*self._modules, *self._parameters)}

    def _remove_added(self, owner: Any) -> None:
        before, added = self._names[id(owner)], self._added.get(id(owner), frozenset())
        for name in vars(owner).keys() - before:
            if name in added or is_set_later(name):
                del vars(owner)[name]


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": list(group["params"])}

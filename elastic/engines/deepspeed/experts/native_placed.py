"""DeepSpeed's own layers of experts, of a model that is in use, with as many experts as another `mesh.ep` gives a rank.

`MoE.__init__` makes copies of one expert (deepspeed/moe/experts.py, release 0.19.8). So where a rank has more than
before the others are copies of what it has, and all get their values by a restore. Layers are the same objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.base import UserObjects
from elastic.engines.deepspeed.experts.native import experts_of, layers_of
from elastic.engines.deepspeed.layers.replaced import hooks_of

_HOOKED = (
    "it has put hooks on experts, and nobody else would do so on those of another mesh.ep: let the experts do it as "
    "they are built"
)
_DIFFER = "it has given the experts of one layer different attributes, and mesh.ep may change"
_APART = (
    "its parameter groups have experts of one layer apart, or in another order than the model has, and nobody but the "
    "function can tell which of them those of another mesh.ep are in"
)
# A layer, and the name of a parameter of an expert in it.
_Place = tuple[int, str]


def obstacle(model: nn.Module, objects: UserObjects) -> str | None:
    """Why the experts of another `mesh.ep` cannot be placed in it; None where they can."""
    if why := changed(model, hooks_of):
        return why
    places = _places(model)
    order = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    for given, others in _with_others(_lists(objects)):
        numbers = [order.get(id(parameter), -1) for parameter in given]
        apart = {places[id(p)] for p in given if id(p) in places} & {places[id(p)] for p in others if id(p) in places}
        if numbers != sorted(numbers) or apart or -1 in numbers:
            return _APART
    return None


def changed(model: nn.Module, hooks: Callable[[Any], frozenset[int]]) -> str | None:
    """What of this the script may do to experts after its engine was built. `hooks`: the numbers of its own on a
    module or a parameter."""
    for layer in layers_of(model).values():
        experts = list(experts_of(layer))
        owners = [owner for expert in experts for owner in (*expert.modules(), *expert.parameters())]
        if any(hooks(owner) for owner in owners):
            return _HOOKED
        if any(_marks(expert) != _marks(experts[0]) for expert in experts):
            return _DIFFER
    return None


def place_again(model: nn.Module, objects: UserObjects, ep: int) -> UserObjects:
    """In another generation. Returns what was given, over the parameters of the experts that there are now. Raises
    UsageError for a model that the script has kept, whose function has not stayed."""
    layers = layers_of(model).values()
    if all(layer.ep_size == ep for layer in layers):
        return objects
    if why := obstacle(model, objects):
        raise UsageError(f"the model was built outside of this generation, for another mesh.ep than {ep}, and {why}")
    before = _places(model)
    for layer in layers:
        _place(layer, ep)
    follow = _Followed(model, before)
    if isinstance(objects.optimizer, torch.optim.Optimizer):
        for group in objects.optimizer.param_groups:
            group["params"] = follow(group["params"])
            if group.get("moe"):
                # By which DeepSpeed finds the group of ranks.
                group["name"] = next(iter(layers)).expert_group_name
    given = objects.model_parameters
    if given is None:
        return objects
    if isinstance(given[0], Mapping):
        return replace(objects, model_parameters=[{**group, "params": follow(group["params"])} for group in given])
    return replace(objects, model_parameters=follow(given))


# -- inside ------------------------------------------------------------------------------------------------------------


class _Followed:
    """A list of parameters of before, with the experts that there are now in the places of the former ones."""

    def __init__(self, model: nn.Module, before: Mapping[int, _Place]) -> None:
        self._parameters, self._before, self._now = list(model.parameters()), before, _places(model)

    def __call__(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kept = {id(parameter) for parameter in given if id(parameter) not in self._before}
        places = {self._before[id(parameter)] for parameter in given if id(parameter) in self._before}
        return [p for p in self._parameters if id(p) in kept or self._now.get(id(p)) in places]


def _place(layer: Any, ep: int) -> None:
    inner, experts = layer.deepspeed_moe, layer.deepspeed_moe.experts
    count, before = layer.num_experts // ep, list(experts_of(layer))
    made = [before[number] if number < len(before) else copy.deepcopy(before[0]) for number in range(count)]
    experts.deepspeed_experts = nn.ModuleList(made).train(experts.deepspeed_experts.training)
    layer.ep_size = inner.ep_size = ep
    layer.expert_group_name = inner.ep_group_name = f"ep_size_{ep}"
    layer.num_local_experts = inner.num_local_experts = experts.num_local_experts = count
    for parameter in experts.parameters():
        # As `Experts.__init__` marks them, which copies of parameters leave behind.
        parameter.allreduce, parameter.group_name = False, layer.expert_group_name


def _places(model: nn.Module) -> dict[int, _Place]:
    """Of each expert's parameter, by its id."""
    return {
        id(parameter): (number, name)
        for number, layer in enumerate(layers_of(model).values())
        for expert in experts_of(layer)
        for name, parameter in expert.named_parameters()
    }


def _lists(objects: UserObjects) -> list[list[torch.Tensor]]:
    """The parameters that were given, by group."""
    if isinstance(objects.optimizer, torch.optim.Optimizer):
        return [list(group["params"]) for group in objects.optimizer.param_groups]
    given = objects.model_parameters
    if given is None:
        return []
    return [list(group["params"]) for group in given] if isinstance(given[0], Mapping) else [list(given)]


def _with_others(lists: list[list[torch.Tensor]]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    for number, given in enumerate(lists):
        yield given, [each for other, more in enumerate(lists) if other != number for each in more]


def _marks(expert: nn.Module) -> Any:
    """What is on its modules besides tensors and other modules."""
    plain = (bool, int, float, str, type(None))
    return [
        {name: value if isinstance(value, plain) else type(value) for name, value in vars(module).items()}
        for module in expert.modules()
    ]

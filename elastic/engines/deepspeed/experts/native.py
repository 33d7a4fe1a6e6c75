"""DeepSpeed's own layers of experts (`deepspeed.moe.layer.MoE`, release 0.19.8), in which each expert is a module.

A rank has `num_experts / ep_size` of them, which DeepSpeed counts from 0 on each rank. Here they have their numbers
among all: the names of one rank with all experts. A rank then holds whole tensors, and nothing of the others' names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, described
from elastic.engines.deepspeed.experts.config import ALONE, SECTION
from elastic.engines.live_state import TensorSpec
from elastic.engines.model.plain_names import named_modules

_HOME = "deepspeed.moe.layer"
_EXPERTS = "deepspeed_experts."


def is_layer(module: Any) -> bool:
    """By the class's name, so that DeepSpeed need not be imported."""
    return any(each.__name__ == "MoE" and each.__module__ == _HOME for each in type(module).__mro__)


def layers_of(model: nn.Module) -> dict[str, Any]:
    """By name."""
    return {name: module for name, module in named_modules(model) if is_layer(module)}


def placed(original: Callable[..., None], self: Any, args: Any, kwargs: Any, mesh: Mesh) -> None:
    """`MoE.__init__` in the mesh of this generation. Raises UsageError where the user has said otherwise."""
    if mesh.per_cell > 1:
        raise UsageError(
            f"native MoE (deepspeed.moe) is not supported with {described(mesh.sp, mesh.tp, 1, mesh.pp)}: which tokens "
            "an expert drops depends on what one rank has of a sample; leave one of them out"
        )
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    size = bound.arguments.setdefault("ep_size", mesh.ep)
    if size != mesh.ep:
        raise UsageError(
            f"MoE was given ep_size={size}, and the job's mesh says ep: {mesh.ep}; leave ep_size out, or give "
            'elastic.get_context().mesh["ep"], and say in the job how many ranks share the experts: '
            f"mesh: {{ep: {size}}}"
        )
    number = bound.arguments.get("num_experts", 1)
    if number % size:
        raise UsageError(f"MoE was given num_experts={number}, and the job's mesh says ep: {size}, no divisor of it")
    original(*bound.args, **bound.kwargs)


def configured(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration, in which the mesh has turned AutoEP on: it would look for other experts."""
    if not layers_of(model):
        return dict(config)
    more = (config.get(SECTION) or {}).keys() - ALONE
    if more:
        raise UsageError(
            f"DeepSpeed option {SECTION}.{min(more)} is for AutoEP, and the model has native MoE layers "
            "(deepspeed.moe) already; remove the section"
        )
    return {key: value for key, value in config.items() if key != SECTION}


def unbind(model: nn.Module) -> None:
    """The next engine gives its layers the groups of its generation; to one that has any it gives none."""
    for layer in layers_of(model).values():
        inner = layer.deepspeed_moe
        inner.ep_group = inner.gate.ep_group = None


def forget_pass(model: nn.Module) -> None:
    """The engine is being closed. Layers keep the auxiliary loss of their last pass, whose graph would keep the engine
    through its hooks."""
    for layer in layers_of(model).values():
        layer.deepspeed_moe.l_aux = layer.deepspeed_moe.exp_counts = None


def names_begin(layer: str) -> str:
    """What the names of its experts begin with."""
    return f"{layer}.deepspeed_moe.experts.{_EXPERTS}".removeprefix(".")


def experts_of(layer: Any) -> Any:
    return layer.deepspeed_moe.experts.deepspeed_experts


class Counterparts:
    """The names of one model's experts: those that a rank has and those that the others have in their place."""

    def __init__(self, module: nn.Module) -> None:
        layers = layers_of(module)
        # How many experts a rank has, by what their names begin with.
        self._counts = {names_begin(name): layer.num_local_experts for name, layer in layers.items()}
        self.any = bool(layers)
        # How many ranks share them.
        self.ep = max((layer.ep_size for layer in layers.values()), default=1)

    def of_names(self, names: Iterable[str]) -> list[str]:
        """Of each name all that ranks have in its place, in one order on all ranks."""
        return [other for name in names for _, other in self._of(name)] if self._counts else list(names)

    def of_specs(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """All tensors of a model of which this rank has these, in the order of one rank with all experts."""
        if not self._counts:
            return list(specs)
        begins: dict[str, int] = {}
        placed: list[tuple[int, int, int, TensorSpec]] = []
        for spec in specs:
            experts = self._list(spec.name)
            for number, name in self._of(spec.name):
                begin = begins.setdefault(experts, len(placed)) if experts else len(placed)
                placed.append((begin, number, len(placed), replace(spec, name=name)))
        return [spec for *_, spec in sorted(placed, key=lambda each: each[:3])]

    def _of(self, name: str) -> list[tuple[int, str]]:
        """Each with its expert's number among all."""
        experts = self._list(name)
        if not experts:
            return [(0, name)]
        number, _, rest = name.removeprefix(experts).partition(".")
        count = self._counts[experts]
        return [(each, f"{experts}{each}.{rest}") for each in range(int(number) % count, count * self.ep, count)]

    def _list(self, name: str) -> str:
        """What the names of a layer's experts begin with, if this is one of them; else nothing."""
        layer, experts, _ = name.partition(_EXPERTS)
        return layer + experts if layer + experts in self._counts else ""

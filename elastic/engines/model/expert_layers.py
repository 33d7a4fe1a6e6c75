"""Layers of experts as a model's own code computes them: what one looks like, and what of it ranks cannot share.

A layer is a module that says how many experts it has (`num_experts`), whose parameters all have them as their first
dimension, and which is called with tokens and with who gets them, in one of two forms:

- routed, as transformers 5 has it: (tokens [T, H], numbers of experts [T, K], their weights [T, K]) -> [T, H], for each
  token the sum of what its experts give it
- grouped, as torchtitan has it: (tokens [R, H] in the order of their experts, how many each expert has [E]) -> [R, H]
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from elastic.core.errors import MeshRefused, UsageError
from elastic.core.mesh import described
from elastic.engines.model.description import aliases
from elastic.engines.model.plain_names import is_compiled, named_modules, plain, unwrapped

# How many arguments a layer is called with.
GROUPED, ROUTED = 2, 3


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """By name."""
    return {name: module for name, module in named_modules(model) if _is_layer(module)}


def form_of(layer: nn.Module) -> int:
    """How many arguments its `forward` takes: GROUPED, ROUTED, or neither."""
    return len(inspect.signature(type(layer).forward).parameters) - 1


def require_shareable(model: nn.Module, sizes: Sequence[int], tp: Sequence[int] = (1,)) -> Mapping[str, Any]:
    """The layers by name, where so many ranks share experts, in this generation or in others, or as many cells of ranks
    that share each layer (`tp`).

    Raises UsageError where there are none, and naming what of one cannot be shared.
    """
    layers, said = expert_layers(model), described(1, 1, max(sizes))
    if not layers:
        raise UsageError(
            f"{said}: {type(model).__name__} has no layer of experts that can be shared: a module with `num_experts`, "
            "whose parameters all have that many entries in their first dimension, called with (tokens, numbers of "
            "experts, weights) or with (tokens in the order of experts, tokens of each); see docs/parallelism.md"
        )
    _refuse_one_graph(model, layers, said)
    tied = {name for pair in aliases(model).items() for name in pair}
    for name, layer in layers.items():
        for size, cell in product(sizes, tp):
            if layer.num_experts % (size * cell):
                fit = "an ep and a tp whose product" if cell > 1 else "an ep that"
                raise (MeshRefused if cell > 1 else UsageError)(
                    f"{described(1, cell, size)}: {name!r} has {layer.num_experts} experts, which {size * cell} "
                    f"workers cannot share evenly; use {fit} divides the number of experts"
                )
        _refuse_parts(name, layer, tied, said)
    return layers


def _refuse_one_graph(model: nn.Module, layers: Mapping[str, Any], said: str) -> None:
    """A layer's call is outside of what torch.compile makes: how many rows come to it is known then only."""
    names = {layer: name for name, layer in layers.items()}
    for own, module in model.named_modules():
        compiled = _compiled(module)
        inside = next((names[child] for child in module.modules() if child in names), None)
        if compiled is None or inside is None:
            continue
        if unwrapped(module) in names:
            raise UsageError(
                f"{said}: the layer of experts {inside!r} is compiled itself, and its calls travel to other workers; "
                "compile the module around it, or what it computes (layer.forward = torch.compile(layer.forward))"
            )
        if compiled.fullgraph:
            raise UsageError(
                f"{said}: {plain(own)!r} is compiled with fullgraph=True, and {inside!r} in it is a layer of experts, "
                "whose rows travel between graphs; leave fullgraph out, or compile what else is in it"
            )


def _compiled(module: nn.Module) -> Any:
    """What torch has of the options of torch.compile, or of `module.compile`; None where it is not compiled."""
    if is_compiled(module):
        return vars(module)["dynamo_ctx"]
    found: Any = module._compiled_call_impl
    return None if found is None else inspect.getclosurevars(found).nonlocals["self"]


def _refuse_parts(name: str, layer: nn.Module, tied: set[str], said: str) -> None:
    unfit = {
        "has buffers, which would be saved of rank 0 alone": [own for own, _ in layer.named_buffers()],
        "has a tensor that is no parameter": [
            own for own, each in vars(layer).items() if isinstance(each, torch.Tensor)
        ],
        "shares a tensor with another module": [own for own in layer._parameters if f"{name}.{own}" in tied],
        "has extra state": [type(layer).__name__] if _has_extra_state(layer) else [],
    }
    for what, found in unfit.items():
        if found:
            raise UsageError(f"{said}: the layer of experts {name!r} {what} ({found[0]}); change it, or leave ep out")


def _has_extra_state(layer: nn.Module) -> bool:
    return any(type(each).get_extra_state is not nn.Module.get_extra_state for each in layer.modules())


def _is_layer(module: nn.Module) -> bool:
    # As an attribute of its own: in a call it is this rank's.
    count, own = vars(module).get("num_experts"), list(module.parameters(recurse=False))
    if not isinstance(count, int) or not own or len(own) != len(list(module.parameters())):
        return False
    return all(each.dim() > 1 and each.shape[0] == count for each in own) and form_of(module) in (GROUPED, ROUTED)


class NoDraws:
    """Experts that ranks share compute on other ranks' tokens: what they draw would depend on which ranks share them.
    Looked at in the first pass that trains."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: list[torch.Tensor] | None = []

    def watch(self, experts: nn.Module) -> None:
        experts.register_forward_pre_hook(self.begin)
        experts.register_forward_hook(self.end)

    def begin(self, experts: nn.Module, inputs: Any) -> None:
        if self._before is not None:
            self._before = _generators(inputs[0].device) if experts.training else []

    def end(self, experts: nn.Module, inputs: Any, _: Any = None) -> None:
        """Raises UsageError where random numbers were drawn since `begin`."""
        if not self._before:
            return
        before, self._before = self._before, None
        if not all(torch.equal(one, other) for one, other in zip(before, _generators(inputs[0].device), strict=True)):
            raise UsageError(
                f"the experts of the MoE layer {self._name!r} draw random numbers (dropout, say), on tokens of other "
                "ranks: training would depend on which ranks share them; draw outside of the experts, or leave mesh.ep "
                "out"
            )


def _generators(device: torch.device) -> list[torch.Tensor]:
    own = [torch.get_rng_state()]
    return [*own, torch.cuda.get_rng_state(device)] if device.type == "cuda" else own

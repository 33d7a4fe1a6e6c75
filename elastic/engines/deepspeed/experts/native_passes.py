"""Forward passes of DeepSpeed's own layers of experts: what would depend on who shares them is made not to, or refused.

Gates, dropped tokens and auxiliary losses are of a rank's own micro-batch (deepspeed/moe/sharded_moe.py, release
0.19.8), and draw from that micro-batch's random stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.experts.native import experts_of, layers_of
from elastic.engines.model.plain_names import FIRST


def prepare(engine: Any, shared: bool) -> None:
    """A new engine: experts get their numbers, and what would depend on who shares them is made not to. `shared`: in
    this generation or in others."""
    ranks = {name: dist.get_rank(group) for name, group in engine.expert_parallel_group.items()}
    for name, layer in layers_of(engine.module).items():
        setattr(experts_of(layer), FIRST, ranks[layer.expert_group_name] * layer.num_local_experts)
        if layer.ep_size > 1:
            layer.deepspeed_moe.gate.register_forward_hook(_of_one_capacity)
        if shared:
            _NoDraws(name).watch(layer.deepspeed_moe.experts)


def _of_one_capacity(gate: Any, _: Any, routes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The ranks of a cell exchange as many places as the one with most tokens has: DeepSpeed takes it for granted that
    all have equally many, and a step's last micro-batch may have fewer. Which tokens a rank drops was decided before,
    by its own capacity; places beyond that stay empty. Collective."""
    from deepspeed import comm

    places = routes[1].detach().to(routes[3].device, torch.int64).clone()
    comm.all_reduce(places, op=comm.ReduceOp.MAX, group=gate.ep_group)
    return (routes[0], places, *routes[2:])


class _NoDraws:
    """Experts of shared layers compute on other ranks' tokens: what they draw would depend on which ranks share them.
    Looked at in the first pass that trains."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: list[torch.Tensor] = []
        self._hooks: list[Any] = []

    def watch(self, experts: nn.Module) -> None:
        self._hooks = [experts.register_forward_pre_hook(self._begin), experts.register_forward_hook(self._end)]

    def _begin(self, experts: nn.Module, inputs: Any) -> None:
        self._before = _generators(inputs[0].device) if experts.training else []

    def _end(self, experts: nn.Module, inputs: Any, _: Any) -> None:
        if not self._before:
            return
        after = _generators(inputs[0].device)
        for hook in self._hooks:
            hook.remove()
        if not all(torch.equal(one, other) for one, other in zip(self._before, after, strict=True)):
            raise UsageError(
                f"the experts of the MoE layer {self._name!r} draw random numbers (dropout, say), on tokens of other "
                "ranks: training would depend on which ranks share them; draw outside of the experts, or leave mesh.ep "
                "out"
            )


def _generators(device: torch.device) -> list[torch.Tensor]:
    own = [torch.get_rng_state()]
    return [*own, torch.cuda.get_rng_state(device)] if device.type == "cuda" else own

"""Forward passes of DeepSpeed's own layers of experts: what would depend on who shares them is made not to, or refused.

Gates, dropped tokens and auxiliary losses are of a rank's own micro-batch (deepspeed/moe/sharded_moe.py, release
0.19.8), and draw from that micro-batch's random stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from elastic.engines.deepspeed.experts.native import experts_of, layers_of
from elastic.engines.model.expert_layers import NoDraws
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
            NoDraws(name).watch(layer.deepspeed_moe.experts)


def _of_one_capacity(gate: Any, _: Any, routes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The ranks of a cell exchange as many places as the one with most tokens has: DeepSpeed takes it for granted that
    all have equally many, and a step's last micro-batch may have fewer. Which tokens a rank drops was decided before,
    by its own capacity; places beyond that stay empty. Collective."""
    from deepspeed import comm

    places = routes[1].detach().to(routes[3].device, torch.int64).clone()
    comm.all_reduce(places, op=comm.ReduceOp.MAX, group=gate.ep_group)
    return (routes[0], places, *routes[2:])

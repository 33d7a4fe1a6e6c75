"""Whole tensors by name out of a live engine, by DeepSpeed's own gathering: a path that shares nothing with ours."""

from __future__ import annotations

from typing import Any

import torch
from native_model import Setup


def full_tensors(engine: Any, setup: Setup) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer: weights, masters, states, buffers. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    found: dict[str, torch.Tensor] = {}
    parameters = dict(engine.module.named_parameters())
    if setup.stage == 3:
        with GatheredParameters(list(parameters.values())):
            found |= {f"weight/{name}": p.detach().clone() for name, p in parameters.items()}
    else:
        found |= {f"weight/{name}": p.detach().clone() for name, p in parameters.items()}
    found |= {f"buffer/{name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            found |= {f"{kind}/{name}": value for kind, value in _trained(engine, setup, parameter).items()}
    return found


def _trained(engine: Any, setup: Setup, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    keys = {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "sgd": ("momentum_buffer",),
        "plain": (),
        "amsgrad": ("max_exp_avg_sq",),
    }
    if setup.stage == 0:
        return _stage0(engine, parameter, keys[setup.optimizer])
    if setup.round_robin and engine.dp_world_size > 1:
        # DeepSpeed's own gathering mixes parameters up under round_robin_gradients.
        return {}
    if setup.stage < 3:
        # With several groups DeepSpeed links after the first group's step, when the others have no state yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {"master": safe_get_full_fp32_param(parameter).clone().view(-1)}
    for key in keys[setup.optimizer]:
        found[key] = safe_get_full_optimizer_state(parameter, key).clone().view(-1)
    return found


def _stage0(engine: Any, parameter: torch.Tensor, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    master = parameter
    for low, high in zip(
        getattr(engine.optimizer, "fp16_groups", ()), getattr(engine.optimizer, "fp32_groups", ()), strict=True
    ):
        for one, other in zip(low, high, strict=True):
            master = other if one is parameter else master
    state = engine.optimizer.state[master]
    return {"master": master.detach().clone().view(-1)} | {key: state[key].clone().view(-1) for key in keys}

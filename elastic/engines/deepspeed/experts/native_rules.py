"""What of DeepSpeed's own layers of experts is refused, before an engine is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.experts.config import size_of
from elastic.engines.deepspeed.experts.native import experts_of, is_layer, layers_of, names_begin
from elastic.engines.deepspeed.pipeline.module import is_pipeline
from elastic.engines.model.description import aliases

# What a layer is made of.
_PARTS = ("deepspeed.moe.sharded_moe", "deepspeed.moe.experts")


def require_carriable(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raises UsageError for native MoE layers that would train otherwise at another number of ranks, or be saved in
    part. `config`: the resolved configuration."""
    layers = layers_of(model)
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    for module in model.modules():
        if type(module).__module__ in _PARTS and id(module) not in inside:
            raise UsageError(
                f"{type(module).__name__} of {type(module).__module__} is supported within a layer of "
                "deepspeed.moe.layer.MoE only: give the model such a layer"
            )
    if not layers:
        return
    if is_pipeline(model):
        raise UsageError("native MoE (deepspeed.moe) in a PipelineModule is not supported: use a plain module")
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (1, 2):
        raise UsageError(
            f"native MoE (deepspeed.moe) is for ZeRO stages 1 and 2, and zero_optimization.stage is {stage}: "
            "use one of these, or plain torch experts, which AutoEP shares out with stage 3 too"
        )
    if (config.get("data_types") or {}).get("grad_accum_dtype") == "fp32":
        raise UsageError("DeepSpeed option data_types.grad_accum_dtype: not run with native MoE here; remove the key")
    ep, tied = max(size_of(config), 1), [name for pair in aliases(model).items() for name in pair]
    for name, layer in layers.items():
        _require_whole(name, layer, ep)
        if size_of(config):
            _require_shareable(name, layer, [other for other in tied if other.startswith(names_begin(name))])


def _require_whole(name: str, layer: Any, ep: int) -> None:
    if layer.ep_size != ep or getattr(layer.deepspeed_moe, "ep_group", None) is not None:
        raise UsageError(
            f"the MoE layer {name!r} was built outside of this generation, for ep_size={layer.ep_size}, and the job's "
            f"mesh says ep: {ep}; build the model anew in the training function, without elastic.keep"
        )
    if layer.deepspeed_moe.use_tutel:
        raise UsageError(f"the MoE layer {name!r} uses Tutel, which has not been run here; leave use_tutel out")
    if any(is_layer(module) for expert in experts_of(layer) for module in expert.modules()):
        raise UsageError(f"an expert of the MoE layer {name!r} has such a layer inside, which is not supported")
    made = [
        [(own, tuple(each.shape), each.requires_grad) for own, each in expert.named_parameters()]
        for expert in experts_of(layer)
    ]
    if any(other != made[0] for other in made):
        raise UsageError(f"the experts of the MoE layer {name!r} are not alike: give them the same parameters")


def _require_shareable(name: str, layer: Any, tied: Sequence[str]) -> None:
    expert = experts_of(layer)[0]
    unfit = {
        "has buffers, which would be saved of rank 0's experts only": [own for own, _ in expert.named_buffers()],
        "has frozen parameters": [own for own, p in expert.named_parameters() if not p.requires_grad],
        "shares a tensor with another module": tied,
        "has extra state": [
            type(each).__name__
            for each in expert.modules()
            if type(each).get_extra_state is not nn.Module.get_extra_state
        ],
    }
    for what, found in unfit.items():
        if found:
            raise UsageError(
                f"an expert of the MoE layer {name!r} {what} ({found[0]}), which is not supported where ranks share "
                "experts; change the expert, or leave mesh.ep out"
            )

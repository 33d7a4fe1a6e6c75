"""Training functions over layers that ranks share."""

from __future__ import annotations

import math
from typing import Any

import cells
import crew
import layered_model
import optimizers
import sharing_model
import torch
import trainings
from layered_model import EVEN, FUSED, KV_HEADS, LAYERS, plan, plan_by_names, plan_of_sequences
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

import elastic
from elastic.engines.fsdp2.sharding import gathered


def written(config: dict[str, Any]) -> Any:
    """The module of the model: with sequences that ranks may share, or without."""
    return sharing_model if config.get("sequences") else layered_model


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(3 + elastic.get_context().coordinates.get(config.get("seeded by", ""), 0))
    of_torch = config.get("engine") == "fsdp2"
    made, numbered = written(config), config.get("numbered")
    with torch.device("meta" if numbered else "cpu"):
        kind = made.Numbered if numbered else made.Transformer
        fused = {"fused": True, "kv_heads": KV_HEADS} if config.get("fused") else {}
        model = kind(config.get("dropout", 0.0), config.get("normed", False), **(EVEN if of_torch else fused))
    if numbered == "there":
        with torch.no_grad():
            model.to_empty(device="cpu").init_weights(torch.device("cpu"))
    model.recomputed = config.get("recomputed", False) is True
    if config.get("plan") == "own":
        model._tp_plan = plan_by_names()
    for name, layer in [*model.layers.named_children()]:
        if config.get("compiled"):
            layer.compile(backend="aot_eager")
        if config.get("recomputed") == "wrapped":
            model.layers.register_module(name, checkpoint_wrapper(layer))
    optimizer = optimizers.of(config, (p for p in model.parameters() if p.requires_grad), lr=0.02)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=made.texts(config.get("size", 37), crew.indices),
        optimizer=optimizer,
        **(of_fsdp2(config, optimizer) if of_torch else of_deepspeed(config)),
    )
    return engine, loader


def of_fsdp2(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduled = config.get("schedule", True)
    options = trainings.of_engine(config, optimizer) if scheduled else {"config": trainings.fsdp2_options(config)}
    options["config"]["gradient_clipping"] = config.get("clipping", 0.5)
    chosen: Any = {"own": None, "sequences": plan_of_sequences()}.get(config.get("plan", ""), plan())
    if config.get("added up"):
        chosen["layers.*.self_attn.q_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    if config.get("plan") == "foreign":
        chosen["head"] = Foreign(output_layouts=Replicate())
    if config.get("plan") == "turned":
        chosen["layers.*.mlp.up_proj"] = Turned()
    return {**options, "tp_plan": chosen}


class Foreign(ColwiseParallel):
    """A style of the user's own."""


class Turned(ColwiseParallel):
    """One of the ranks that share a layer gets rows in another order than its placement says."""

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        if device_mesh.get_local_rank() == 1:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(parameter.flip(0))
        return super()._apply(module, device_mesh)


def of_deepspeed(config: dict[str, Any]) -> dict[str, Any]:
    trainings.believe_in_half_precision(config.get("dtype") == "fp16")
    native = trainings.deepspeed_config(config)
    if config.get("layers", True):
        layers = FUSED if config.get("fused") else LAYERS
        native["tensor_parallel"] = {"partition_config": layers, **config.get("tensor_parallel", {})}
    if config.get("added up"):
        spec = {"patterns": [r".*\.q_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
        specs = [*LAYERS["layer_specs"], spec]
        native["tensor_parallel"] = {"partition_config": {**LAYERS, "layer_specs": specs}}
    return {"config": native}


def spoil_gradient(engine: Any) -> None:
    """Of one layer's slices, on the ranks that have the second ones: none of the first sees it in its own gradients."""
    if elastic.get_context().coordinates["tp"] == 1:
        weight = gathered(engine.module)["layers.1.mlp.up_proj.weight"]
        handle = weight.register_hook(lambda gradient: handle.remove() or gradient * math.nan)


def skew_gradient(engine: Any, name: str) -> None:
    """Of what nobody's slice is, on the ranks that have the second slices: in their lane it looks right."""
    if elastic.get_context().coordinates["tp"] == 1:
        handle = gathered(engine.module)[name].register_hook(lambda gradient: handle.remove() or gradient + 0.1)


def drift(engine: Any) -> None:
    with torch.no_grad():
        engine.module.layers[0].mlp.up_proj.weight.add_(1.0)


def train(config: dict[str, Any]) -> None:
    cells.begun()
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    abandoned = 0
    for _ in elastic.epochs():
        for tokens, labels in loader:
            context = elastic.get_context()
            if config.get("lengths"):
                length = layered_model.LENGTH - context.step % 4
                tokens, labels = tokens[:, :length], labels[:, :length]
            last = engine.is_gradient_accumulation_boundary()
            with cells.step_of(config):
                cells.come_to(config, "forward", last)
                loss = written(config).loss_of(engine(tokens), labels)
                if config.get("nan at") == context.step:
                    spoil_gradient(engine)
                if config.get("skewed at") == context.step:
                    skew_gradient(engine, config["skewed"])
                cells.come_to(config, "backward", last)
                engine.backward(loss)
                if config.get("drift at") == context.step and context.rank == config["victim"]:
                    drift(engine)
                cells.come_to(config, "step", last)
                engine.step()
                if config.get("drift of a factor") == context.step and context.rank == 1:
                    next(iter(engine.optimizer.state.values()))["squares"]["0"].add_(1.0)
            abandoned += elastic.get_context().abandoned
    weights = {name: whole_part(value) for name, value in engine.module.named_parameters()}
    cells.told(passes=float(engine.module.passes), weights=weights, abandoned=abandoned)


def whole_part(value: Any) -> torch.Tensor:
    """What this rank has of a parameter."""
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local.detach().clone()

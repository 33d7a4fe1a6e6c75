"""Training functions over the stages of a pipeline by torch.distributed.pipelining, sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import cells
import crew
import layered_model
import sharing_model
import torch
import trainings
from layered_model import plan
from pipeline_model import BLOCKS
from pipelined import Loss, content
from staged_model import ROW, Staged, trained

import elastic


def model_of(config: dict[str, Any]) -> Staged:
    torch.manual_seed(3 + elastic.get_context().coordinates.get(config.get("seeded by", ""), 0))
    model = Staged(config.get("dropout", 0.0), config.get("tied", False), config.get("blocks", BLOCKS))
    if config.get("sequences"):
        sharing_model.share(model)
    return model


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    model: Any = model_of(config)
    crew.told["initial"] = {name: value.detach().clone() for name, value in model.named_parameters()}
    if config.get("views"):
        for layer in model.layers:
            layer.register_forward_hook(lambda module, given, output: output.view(output.shape))
    if config.get("stray"):
        model.scale = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW(trained(model), lr=config.get("rate", 0.02))
    options = trainings.of_engine(config, optimizer) if config.get("schedule", True) else {}
    options["config"] = {**trainings.fsdp2_options(config), "gradient_clipping": config.get("clipping", 0.3)}
    pipeline = elastic.Pipeline(Loss(config), **{"layers": ROW, **config.get("pipeline", {})})
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=(sharing_model if config.get("sequences") else layered_model).texts(
            config.get("size", 37), crew.indices
        ),
        optimizer=optimizer,
        weights=trainings.weights_of(config),
        tp_plan=config.get("plan") and tp_plan(config["plan"]),
        pipeline=None if config.get("no pipeline") else pipeline,
        **options,
    )
    crew.told["names"] = [name for name, _ in engine.module.named_parameters()]
    return engine, loader


def tp_plan(which: str) -> dict[str, Any]:
    """`which`: "all", or what is left whole."""
    made = plan()
    made.pop(which, None)
    return made


def drift(engine: Any, config: dict[str, Any]) -> None:
    """One stage's copies of a parameter."""
    coordinates = elastic.get_context().coordinates
    if all(coordinates[axis] == at for axis, at in config["where"].items()):
        with torch.no_grad():
            dict(engine.module.named_parameters())[config["drifts"]].mul_(1.1)


def train(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    crew.told["length"] = len(loader)
    losses = []
    for _ in elastic.epochs():
        for batches in loader:
            losses.append(float(engine.train_batch(batches)))
            if config.get("drifts after") == elastic.get_context().step:
                drift(engine, config)
    evaluated = engine.eval_batch(iter([content(range(2)), content(range(2, 4))]), num_micro_batches=2)
    cells.told(losses=losses, evaluated=float(evaluated))

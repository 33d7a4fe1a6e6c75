"""Training functions over the stages of a pipeline by torch.distributed.pipelining, sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import cells
import compiled
import crew
import layered_model
import optimizers
import sharing_model
import torch
import trainings
from expert_model import BALANCE
from hybrid import drift
from layered_model import plan
from pipeline_model import BLOCKS
from pipelined import Loss, content
from staged_model import ROW, Staged, StagedMixture, trained

import elastic


def model_of(config: dict[str, Any]) -> Staged:
    torch.manual_seed(3 + elastic.get_context().coordinates.get(config.get("seeded by", ""), 0))
    kind = StagedMixture if config.get("experts") else Staged
    deferred = config.get("deferred")
    with torch.device("meta" if deferred else "cpu"):
        model = kind(config.get("dropout", 0.0), config.get("tied", False), config.get("blocks", BLOCKS))
    model.to(getattr(torch, config.get("precision", "float32")))
    if deferred == "there":
        with torch.no_grad():
            model.to_empty(device="cpu").init_weights()
    if config.get("frozen"):
        model.layers[2].mlp.experts.w2.requires_grad_(False)
    if config.get("sequences"):
        sharing_model.share(model)
    return model


class BalancedLoss(Loss):
    """How uneven a part of the sequences spreads over the experts is no part of how uneven the whole does."""

    def __call__(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        logits, uneven = outputs
        found = super().__call__(logits, labels)
        return found if self._config.get("sequences") else found + BALANCE * uneven


def _count(layer: Any, *_: Any) -> None:
    layer.passes += float(layer.training)


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    model: Any = model_of(config)
    there = {name: value for name, value in model.named_parameters() if not value.is_meta}
    crew.told["initial"] = {name: value.detach().clone() for name, value in there.items()}
    if config.get("views"):
        for layer in model.layers:
            layer.register_forward_hook(lambda module, given, output: output.view(output.shape))
    if config.get("stray"):
        model.scale = torch.nn.Parameter(torch.ones(1))
    if config.get("counts"):
        for layer in model.layers:
            layer.register_buffer("passes", torch.zeros(1))
            layer.register_forward_hook(_count)
    if watched := config.get("watched"):
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: watched("forward"))
            layer.register_full_backward_hook(lambda *_: watched("backward"))
    compiled.by(config.get("compiled", "nothing"), model, model.layers)
    optimizer = optimizers.of(config, trained(model), lr=config.get("rate", 0.02), eps=config.get("eps", 1e-8))
    options = trainings.of_engine(config, optimizer) if config.get("schedule", True) else {}
    options["config"] = {**trainings.fsdp2_options(config), "gradient_clipping": config.get("clipping", 0.3)}
    loss = (BalancedLoss if config.get("experts") else Loss)(config)
    pipeline = elastic.Pipeline(loss, **{"layers": ROW, **config.get("pipeline", {})})
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=(sharing_model if config.get("sequences") else layered_model).texts(
            config.get("size", 37), crew.indices
        ),
        optimizer=optimizer,
        weights=trainings.weights_of(config),
        tp_plan=config.get("plan") and tp_plan(config),
        pipeline=None if config.get("no pipeline") else pipeline,
        **options,
    )
    return engine, loader


def tp_plan(config: dict[str, Any]) -> dict[str, Any]:
    """`config["plan"]`: "all", or what is left whole."""
    made = plan()
    made.pop(config["plan"], None)
    if config.get("experts"):
        made["head.module"] = made.pop("head")
    return made


def train(config: dict[str, Any]) -> None:
    cells.begun()
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    crew.told["length"] = len(loader)
    losses: dict[int, float] = {}
    abandoned = 0
    for _ in elastic.epochs():
        for batches in loader:
            loss = float(engine.train_batch(batches))
            context = elastic.get_context()
            if context.abandoned:
                assert loss == 0.0
                abandoned += 1
                continue
            losses[context.step] = loss
            crew.told["names"] = [name for name, _ in engine.module.named_parameters()]
            compiled.count()
            if config.get("drifts after") == context.step and context.rank in config["drift"]:
                drift(engine, config["drifts"])
    count = 2 + (elastic.get_context().coordinates["dp"] if config.get("evaluates unevenly") else 0)
    contents = [content(range(2 * number, 2 * number + 2)) for number in range(count)]
    evaluated = engine.eval_batch(iter(contents), num_micro_batches=count)
    cells.told(losses=list(losses.values()), steps=losses, evaluated=float(evaluated), abandoned=abandoned)

"""Training functions over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cells
import crew
import optimizers
import sequence_model
import torch
import trainings
from layered_model import text, texts
from pipeline_model import layers, loss_of

import elastic


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(3 + elastic.get_context().coordinates.get(config.get("seeded by", ""), 0))
    made = layers(config.get("dropout", 0.0), config.get("tied", False))
    if config.get("watched") or config.get("counts"):
        for spec in made:
            spec.typename = _watching(spec.typename, config.get("watched"))
    given = {"loss_fn": Loss(config), "partition_method": "uniform", **config.get("module", {})}
    model: Any = PipelineModule(layers=made, **given)
    if config.get("stray"):
        model.scale = torch.nn.Parameter(torch.ones(()))
    if config.get("layers whole"):
        model = torch.nn.Sequential(*(spec.build() for spec in made))
    if config.get("hooks"):
        next(iter(model.children())).register_forward_hook(lambda *_: None)
    trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.get("grouped"):
        trained = [{"params": trained[:1], "weight_decay": 0.0}, {"params": trained[1:]}]
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=texts(config.get("size", 37), crew.indices),
        optimizer=optimizers.of(config, trained, lr=config.get("rate", 0.02)),
        weights=trainings.weights_of(config),
        config=trainings.deepspeed_config(config),
    )
    return engine, loader


def _watching(layer: type[torch.nn.Module], watched: Callable[[str], None] | None) -> type[torch.nn.Module]:
    class Watching(layer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if watched is None:
                self.register_buffer("passes", torch.zeros(1))

        def forward(self, *inputs: Any) -> Any:
            if watched is None:
                self.passes += float(self.training)
            else:
                watched("forward")
            return super().forward(*inputs)

    return Watching


def content(indices: range) -> list[torch.Tensor]:
    """As a loader would give them."""
    return [torch.stack(part) for part in zip(*map(text, indices), strict=True)]


class Loss:
    """Of the last stage. The ranks in `config["victims"]` stay in it in step `config["at"]`, for ever."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        context = elastic.get_context()
        if self._config.get("at") == context.step and context.world_size == self._config.get("ranks", 4):
            crew.point("there")
            if context.rank in self._config["victims"]:
                crew.stay()
        if self._config.get("bad step") == context.step and context.coordinates["dp"] == context.mesh["dp"] - 1:
            logits = logits * float("inf")
        if watched := self._config.get("watched"):
            watched("loss")
        # Of the last layer's random stream, after its dropout.
        crew.told.setdefault("draws", []).append(float(torch.rand(())))
        found = sequence_model.loss_of if self._config.get("sequences") else loss_of
        return found(logits, labels) * self._config.get("loss", 1.0)


def drift(engine: Any, config: dict[str, Any]) -> None:
    """One stage's copies of a parameter."""
    coordinates = elastic.get_context().coordinates
    if all(coordinates[axis] == at for axis, at in config["where"].items()):
        with torch.no_grad():
            engine.module.get_parameter(config["drifts"]).mul_(1.1)


def train(config: dict[str, Any]) -> None:
    cells.begun()
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    crew.told["initial"] = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    crew.told["length"] = len(loader)
    model, losses, layers = engine.module, dict[int, float](), dict[str, Any]()
    model.register_forward_pre_hook(lambda *_: crew.told.update(passes=crew.told.get("passes", 0) + 1))
    abandoned = 0
    for _ in elastic.epochs():
        for batches in loader:
            loss = float(engine.train_batch(batches))
            context = elastic.get_context()
            if context.abandoned:
                abandoned += 1
                continue
            losses[context.step] = loss
            if config.get("evaluates at") == context.step:
                # Other micro-batches than those of training.
                given = [content(range(5)), content(range(5, 10))]
                crew.told["evaluated in the loop"] = float(engine.eval_batch(iter(given), num_micro_batches=2))
            assert engine.module is model
            for name, layer in (*model.named_children(), *model.tied_modules.named_children()):
                assert name == "tied_modules" or layers.setdefault(name, layer) is layer, "they come back"
            if config.get("drifts after") == context.step:
                drift(engine, config)
    cells.told(
        losses=list(losses.values()),
        steps=losses,
        abandoned=abandoned,
        held=sorted(layers),
        evaluated=float(engine.eval_batch(iter([content(range(2)), content(range(2, 4))]), num_micro_batches=2)),
        weights={name: value.detach().clone() for name, value in engine.module.named_parameters()},
    )

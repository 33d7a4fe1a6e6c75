"""The engine that the user holds where the model is a pipeline: one call for each step, as DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from elastic.core.data.micro_batches import MicroBatch, loss_scale
from elastic.core.errors import GenerationEnded, RunOver, UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.engines.base import MicroStep, Pipelined
from elastic.training import rng
from elastic.training.data.loader import ElasticLoader, StepBatches
from elastic.training.engine import ElasticEngine

_LOOP = "for batches in loader: loss = engine.train_batch(batches)"


class PipelinedEngine(ElasticEngine):
    """`reads` once, then `train_batch` for every step."""

    def reads(self, loader: ElasticLoader) -> None:
        """What `train_batch` without data takes its batches from."""
        loader.by_steps = True
        self._own = _again_and_again(loader)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """One optimizer step: the mean loss over the global batch, the same on all ranks. Collective.

        `data_iter` is what the loader gives, all micro-batches of a step; or an iterator over the loader, of which the
        next is taken; None: the loader itself. Ends the function by itself where the run is over. Zero in a step that
        is abandoned."""
        batches = data_iter if isinstance(data_iter, StepBatches) else self._next(data_iter)
        try:
            return self._train_batch(batches)
        except (Exception, GenerationEnded) as error:
            if not self._abandoned(error):
                raise
            return torch.zeros((), device=self._scope.device)

    def _train_batch(self, batches: StepBatches) -> torch.Tensor:
        self._check("train_batch")
        self._scope.moved()
        progress = batches.progress
        if progress is not self._steps.progress or progress.active is None:
            raise UsageError(f"these batches belong to another step; write `{_LOOP}`")
        engine = self._open()
        assert isinstance(engine, Pipelined)
        if self._watch is not None:
            self._watch.begin()
        steps = [self._micro_step(batches, number, batch) for number, batch in enumerate(progress.batches)]
        with self._scope.translating():
            loss, outcome = engine.train_batch(steps, self.plan.consumed(progress.step + 1), self._before_update)
        self._buffers.restore()
        progress.next_batch = len(progress.batches)
        progress.finish_batch()
        self._step_finished(progress, outcome)
        return loss

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        raise _not_by_parts("forward")

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> NoReturn:
        raise _not_by_parts("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_by_parts("step")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _next(self, data_iter: Any) -> StepBatches:
        try:
            batches = next(self._own if data_iter is None else data_iter)
        except StopIteration:
            if not self._steps.finished:
                raise
            raise RunOver(self._scope.step) from None
        if not isinstance(batches, StepBatches):
            raise UsageError(
                f"engine.train_batch was given an iterator over {type(batches).__name__}: give what the loader of "
                f"elastic.initialize gives, `{_LOOP}`"
            )
        return batches

    def _micro_step(self, batches: StepBatches, number: int, batch: MicroBatch) -> MicroStep:
        spec, step = self._scope.spec, batches.progress.step
        part = spec.mesh.sequence(spec.rank)
        scale = loss_scale(batch.weight, self.plan.micro_steps, self.plan.world_size)

        def before_forward(modules: Iterable[torch.nn.Module]) -> None:
            if batch.weight == 0.0:
                # Padding comes last in each layer: what its buffers are now they are after the step.
                self._buffers.keep(*modules)

        def before_layer(layer: int) -> None:
            rng.seed_everything(*rng.layer_stream(spec.seed, step, batch.index, layer, part))

        def scaled(loss: torch.Tensor) -> torch.Tensor:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UsageError("the pipeline's loss_fn must give one number, the mean loss of the micro-batch")
            if batch.weight > 0.0:
                # Of the last stage, whose ranks alone see it: the reports of all ranks are added up.
                self._loss = self._loss + loss.detach().float() * (batch.weight / (spec.sp * spec.tp))
            return loss * scale if self._watch is None else self._watch.guarded(loss, scale)

        return MicroStep(lambda: batches.read(number), before_forward, before_layer, scaled, batch.samples)


def require_pipeline(model: Any, pp: int, streams: bool, engine: str, pipeline: Any) -> None:
    """Raises UsageError for what cannot be where `pp` ranks share the layers."""
    mesh = f"mesh: {{pp: {pp}}}"
    if engine == "fsdp2" and pipeline is None:
        raise UsageError(
            f"{mesh} needs pipeline=elastic.Pipeline(loss_fn, layers=[...]) in elastic.initialize, which says what the "
            "layers are, with own_forward=True where the model's own forward is to call them"
        )
    # By its name: which library it is of is the engine's business.
    if engine != "fsdp2" and not any(each.__name__ == "PipelineModule" for each in type(model).__mro__):
        raise UsageError(
            f"{mesh} needs a deepspeed.pipe.PipelineModule, which says what the layers are; this model is a "
            f"{type(model).__name__}. With engine: fsdp2 stages call a model's own forward "
            "(elastic.Pipeline(own_forward=True))"
        )
    if streams:
        raise UsageError(f"streams and {mesh} are not supported together: give a map-style dataset")


def refuse_measures(spec: GenerationSpec) -> None:
    """Raises UsageError for what is measured in passes that an engine which orders them itself does not show."""
    asked = {"gradient_noise": spec.noise_every_steps, "audit": spec.audit_every_steps}
    for name in (name for name, every in asked.items() if every is not None):
        raise UsageError(f"{name} and a pipeline are not supported together, at any mesh.pp: leave one of them out")


def _again_and_again(loader: ElasticLoader) -> Iterator[Any]:
    """Epoch after epoch; the loader ends the function after the run's last."""
    while True:
        yield from loader


def _not_by_parts(call: str) -> UsageError:
    return UsageError(f"engine.{call} does not exist for a pipeline, whose steps are one call each: `{_LOOP}`")

"""What the user's training code calls: `initialize`, `report`, `get_context`, `state`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.engines.base import Engine, ResolvedConfig
from elastic.training import context
from elastic.training.anomalies import AnomalyWatch
from elastic.training.context import Context, StateOfTheRun
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.reader import BatchReader, require_map_style
from elastic.training.engine import ElasticEngine
from elastic.training.generation import Generation
from elastic.training.resume import resume, run_state
from elastic.training.session import Phase
from elastic.training.snapshots import Snapshots
from elastic.training.state.engine_state import open_state
from elastic.training.step_loop import StepLoop

state = StateOfTheRun()


def initialize(
    model: Any,
    training_data: Any,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    model_parameters: Any = None,
    *,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
) -> tuple[ElasticEngine, Any, ElasticLoader, Any]:
    """`deepspeed.initialize`, elastic: returns (engine, optimizer, loader, scheduler).

    The arguments are DeepSpeed's. `training_data` is a map-style dataset; `config` is a DeepSpeed configuration, the
    path of one, or None for the job's own. `num_workers` and `prefetch_factor` are those of torch's DataLoader. With a
    checkpoint to resume from, everything is restored when this returns, `elastic.state` included.

    Outside of a run (`python train.py`, torchrun) it trains as DeepSpeed would, at the world size that the environment
    gives, without saving.

    Raises UsageError (ModelMismatch for a checkpoint of another model).
    """
    generation = _generation()
    scope = generation.scope
    scope.check()
    if generation.has_engine:
        raise UsageError("elastic.initialize was called twice; one generation trains one engine")
    scope.enter(Phase.BUILDING)
    size = require_map_style(training_data)
    resolved = generation.kind.resolve(config, scope.spec)
    anomalies = scope.spec.anomalies
    engine, wrapped_optimizer, scheduler = generation.kind.build(
        resolved,
        anomalies.policy if anomalies is not None else None,
        scope.device,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
    )
    generation.own(engine)
    generation.group.seal()
    steps, watch = _opened(generation, engine, _plan(scope.spec, resolved, size))
    reader = BatchReader(
        training_data,
        steps.plan,
        SampleOrder(size, scope.spec.seed),
        scope.step,
        collate_fn,
        num_workers,
        prefetch_factor,
        pin_memory=scope.device.type == "cuda",
        worker_init_fn=generation.group.close_in_child(),
    )
    users, loader = ElasticEngine(engine, scope, steps, watch), ElasticLoader(scope, steps, reader)
    generation.began(steps, users, loader)
    return users, wrapped_optimizer, loader, scheduler


def report(**metrics: Any) -> None:
    """Attach this rank's own metrics to the report of the current step (of the next one, between two steps)."""
    _generation().note(metrics)


def get_context() -> Context:
    """Where this worker is now: rank, world size, generation, step, device, whether it resumed."""
    return Context.of(_generation().scope)


# -- inside -----------------------------------------------------------------------------------------------------------


def _generation() -> Generation:
    generation = context.current()
    if generation is None:
        # Not at the top: most processes never need it.
        from elastic.training.local import start_local

        generation = start_local()
    return generation


def _plan(spec: GenerationSpec, resolved: ResolvedConfig, dataset_size: int) -> StepPlan:
    return StepPlan(
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        world_size=spec.world_size,
        rank=spec.rank,
        dataset_size=dataset_size,
        total_samples=total_samples(
            dataset_size, resolved.global_batch, spec.batch.max_steps, spec.batch.epochs, spec.skips
        ),
        micro_steps=resolved.micro_steps,
        skips=spec.skips,
    )


def _opened(generation: Generation, engine: Engine, plan: StepPlan) -> tuple[StepLoop, AnomalyWatch | None]:
    """The engine's state is opened and, when the spec names a checkpoint, restored. Collective.

    Raises UsageError, ModelMismatch, IntegrityError or StorageError.
    """
    scope = generation.scope
    state = open_state(engine)
    generation.closing.callback(state.close)
    saved_step = None
    if scope.spec.checkpoint is not None:
        plan = resume(scope, state, plan, generation.state)
        # A snapshot in memory is not in storage yet: a run that ends here still has to save it.
        saved_step = None if is_snapshot(scope.spec.checkpoint) else scope.step
    snapshots = Snapshots(scope, state, lambda: run_state(scope, plan, generation.state), saved_step)
    generation.closing.callback(snapshots.close)
    watch = AnomalyWatch(engine, scope.spec.anomalies, state.agreement) if scope.spec.anomalies is not None else None
    return StepLoop(scope, plan, snapshots, generation.take_metrics), watch

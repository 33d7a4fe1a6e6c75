"""What the user's training code calls: `initialize`, `report`, `get_context`, `state`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.errors import UsageError
from elastic.engines.deepspeed.config import ResolvedConfig, read_config, resolve
from elastic.engines.deepspeed.refused import refuse_model
from elastic.training import context
from elastic.training.context import Context, Generation, StateOfTheRun
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.reader import BatchReader, require_map_style
from elastic.training.engine import ElasticEngine
from elastic.training.session import Phase

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
    generation.check()
    if generation.engine is not None:
        raise UsageError("elastic.initialize was called twice; one generation trains one engine")
    generation.enter(Phase.BUILDING)
    refuse_model(model)
    size = require_map_style(training_data)
    resolved = _resolve(generation, config)
    plan = _plan(generation, resolved, size)
    engine, wrapped_optimizer, _, scheduler = _deepspeed_initialize(
        generation,
        resolved,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
    )
    # From here on the runner lets go of DeepSpeed's engine however the generation ends.
    generation.engine = ElasticEngine(engine, generation, plan)
    generation.engine.open()
    plan = generation.engine.plan
    reader = BatchReader(
        training_data,
        plan,
        SampleOrder(size, generation.spec.seed),
        generation.step,
        collate_fn,
        num_workers,
        prefetch_factor,
        pin_memory=generation.device.type == "cuda",
        worker_init_fn=generation.group.close_in_child(),
    )
    generation.loader = ElasticLoader(generation, plan, reader)
    return generation.engine, wrapped_optimizer, generation.loader, scheduler


def report(**metrics: Any) -> None:
    """Attach this rank's own metrics to the report of the step under way (of the next one, between two steps)."""
    _generation().metrics.update(metrics)


def get_context() -> Context:
    """Where this worker is now: rank, world size, generation, step, device, whether it resumed."""
    return _generation().context()


# -- inside -----------------------------------------------------------------------------------------------------------


def _generation() -> Generation:
    generation = context.current()
    if generation is None:
        # Not at the top: local imports this package's parts, and most processes never need it.
        from elastic.training.local import start_local

        generation = start_local()
    return generation


def _resolve(generation: Generation, config: Mapping[str, Any] | str | os.PathLike[str] | None) -> ResolvedConfig:
    spec = generation.spec
    chosen = config if config is not None else spec.deepspeed_config
    if chosen is None:
        raise UsageError(
            "no DeepSpeed configuration: pass config= to elastic.initialize, or give the job's `deepspeed`"
        )
    return resolve(read_config(chosen), spec.batch, spec.world_size, max(spec.max_world_size, spec.world_size))


def _plan(generation: Generation, resolved: ResolvedConfig, dataset_size: int) -> StepPlan:
    spec = generation.spec
    return StepPlan(
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        world_size=spec.world_size,
        rank=spec.rank,
        dataset_size=dataset_size,
        total_samples=total_samples(
            dataset_size, resolved.global_batch, spec.batch.max_steps, spec.batch.epochs, spec.skips
        ),
        passes=resolved.passes,
        skips=spec.skips,
    )


def _deepspeed_initialize(generation: Generation, resolved: ResolvedConfig, **arguments: Any) -> tuple[Any, ...]:
    import deepspeed

    made: tuple[Any, ...] = deepspeed.initialize(config=resolved.deepspeed, dist_init_required=False, **arguments)
    generation.group.seal()
    return made

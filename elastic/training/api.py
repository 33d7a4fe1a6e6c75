"""What the training code calls: `initialize`, `prepare_data_loader`, `epochs`, `busy`, `report`, `get_context`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.data.metrics import plain
from elastic.core.data.readers import READERS
from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import WeightsSettings
from elastic.engines.base import Config, Engine, ResolvedConfig
from elastic.training import context
from elastic.training.anomalies import AnomalyWatch
from elastic.training.arguments import chosen_config, chosen_weights, refuse_arguments
from elastic.training.busy import reporting
from elastic.training.context import Context, StateOfTheRun
from elastic.training.data import cursor
from elastic.training.data.blocks import InBlocks
from elastic.training.data.data_loaders import DataSource, PreparedLoader, data_source, open_reader, taken_over
from elastic.training.data.loader import ElasticLoader, elapsing_epochs
from elastic.training.data.reader import MicroBatchReader
from elastic.training.data.stream.repeated import RepeatedSteps
from elastic.training.data.stream.spec import Stream
from elastic.training.engine import ElasticEngine
from elastic.training.generation import Generation
from elastic.training.saving.resume import resume, run_state
from elastic.training.saving.snapshots import Snapshots
from elastic.training.session import Phase
from elastic.training.state.engine_state import open_state
from elastic.training.step_loop import StepLoop

state = StateOfTheRun()


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
    *,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    weights: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[ElasticEngine, Any, ElasticLoader, Any]:
    """`deepspeed.initialize`, elastic: returns (engine, optimizer, loader, scheduler).

    The arguments are DeepSpeed's, in its order. `training_data` is a map-style dataset, a torch DataLoader, a stream of
    `elastic.data` or a Hugging Face IterableDataset; without it, the loader given to `prepare_data_loader` is
    used. `config` is a DeepSpeed configuration, the path of one, or None for `args.deepspeed_config` or the job's own.
    `num_workers` and `prefetch_factor` are those of torch's DataLoader. `weights` is what a new run begins with: a
    folder (see `WeightsSettings`), or the job key `weights` as a dictionary. With a checkpoint to resume from,
    everything is restored when this returns, `elastic.state` included.

    Outside of a run (`python train.py`, torchrun) it trains as DeepSpeed would, at the world size that the environment
    gives, without saving.

    Raises UsageError (ModelMismatch for a checkpoint of another model).
    """
    refuse_arguments(args, model, mpu, mesh_param, distributed_port)
    generation = _generation()
    scope = generation.scope
    scope.check()
    if generation.has_engine:
        raise UsageError("elastic.initialize was called twice; one generation trains one engine")
    chosen = chosen_weights(weights, scope.spec)
    scope.enter(Phase.BUILDING)
    prepared = _prepared(generation, training_data)
    source = data_source(training_data if prepared is None else prepared, collate_fn, num_workers, prefetch_factor)
    resolved = generation.kind.resolve(chosen_config(args, config, config_params), scope.spec, source.micro_batch)
    nonfinite = scope.spec.anomalies.policy if scope.spec.anomalies is not None else None
    engine, wrapped_optimizer, scheduler = generation.kind.build(
        resolved,
        nonfinite if nonfinite != "off" else None,
        scope.device,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
    )
    generation.own(engine)
    generation.group.seal()
    steps, watch, reader = _opened(generation, engine, _plan(scope.spec, resolved, source), source, chosen)
    users = ElasticEngine(engine, scope, steps, generation.state, watch)
    loader = ElasticLoader(scope, steps, reader, source)
    if prepared is not None:
        prepared.loader = loader
    generation.began(steps, users, loader)
    return users, wrapped_optimizer, loader, scheduler


def prepare_data_loader(loader: Any) -> PreparedLoader:
    """Make a torch DataLoader the run's elastic loader. Call it before `initialize`, which then needs no training_data.

    Dataset, collate_fn, workers and shuffling are taken over; the batch size is the micro-batch. A DistributedSampler
    is not needed, and does no harm. Raises UsageError for a sampler whose order cannot be kept, by name.
    """
    generation = _generation()
    if generation.has_engine:
        raise UsageError(
            "elastic.prepare_data_loader was called after elastic.initialize: call it before, or pass the DataLoader "
            "as training_data=; a DataLoader for evaluation needs no preparation"
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(f"elastic.prepare_data_loader takes a torch DataLoader, not a {type(loader).__qualname__}")
    if generation.prepared is not None:
        raise UsageError(
            "elastic.prepare_data_loader was called twice: prepare the training loader only; a DataLoader for "
            "evaluation needs no preparation"
        )
    generation.prepared = PreparedLoader(taken_over(loader))
    return generation.prepared


def epochs(count: int | None = None) -> Iterator[int]:
    """The epochs that are left of the run, below `count`: `for epoch in elastic.epochs(3): for batch in loader: ...`.

    Begins at the epoch that the run is in, so that after a recovery nothing is repeated that belongs to an earlier one.
    The job's `epochs` or `max_steps` end it too. Raises UsageError before `initialize`.
    """
    generation = _generation()
    if generation.loader is None or generation.steps is None:
        raise UsageError("elastic.epochs() comes after elastic.initialize(), which makes the loader")
    return elapsing_epochs(generation.loader, generation.steps, count)


def busy(what: str, limit_s: float = 3600.0) -> AbstractContextManager[None]:
    """`with elastic.busy("evaluating"):` code in it may take `limit_s` without a step and is not taken for a hang.

    Not needed around code that calls the engine, the loader or this module every now and then.
    """
    return reporting(_generation().scope, what, limit_s)


def report(**metrics: Any) -> None:
    """Attach this rank's own metrics to the report of the current step (between two steps: of the one just finished).

    Values are numbers, text, None, tensors or arrays of one element, and lists and mappings of these. Raises UsageError
    for any other value, naming the metric.
    """
    generation = _generation()
    generation.scope.moved()
    generation.note({name: plain(name, value) for name, value in metrics.items()})


def get_context() -> Context:
    """Where this worker is now: rank, world size, generation, step, device, whether it resumed."""
    generation = _generation()
    generation.scope.moved()
    return Context.of(generation)


# -- inside -----------------------------------------------------------------------------------------------------------


def _generation() -> Generation:
    generation = context.current()
    if generation is None:
        # Not at the top: most processes never need it.
        from elastic.training.local import start_local

        generation = start_local()
    return generation


def _prepared(generation: Generation, training_data: Any) -> PreparedLoader | None:
    prepared = generation.prepared
    if training_data is None and prepared is None:
        raise UsageError(
            "elastic.initialize has no data: pass training_data= (a dataset or a DataLoader), or call "
            "elastic.prepare_data_loader(loader) before it"
        )
    if prepared is not None and training_data is not None and training_data is not prepared:
        raise UsageError("training_data was given although a DataLoader was prepared; give one of them")
    return prepared


def _plan(spec: GenerationSpec, resolved: ResolvedConfig, source: DataSource) -> StepPlan:
    blocks = source.dataset if isinstance(source.dataset, InBlocks) else None
    return StepPlan(
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        world_size=spec.world_size,
        rank=spec.rank,
        dataset_size=source.size,
        total_samples=total_samples(
            source.size, resolved.global_batch, spec.batch.max_steps, spec.batch.epochs, spec.skips
        ),
        micro_steps=resolved.micro_steps,
        skips=spec.skips,
        shuffle=source.shuffle,
        stream=source.dataset.facts if isinstance(source.dataset, Stream) else (),
        block=blocks.block if blocks is not None else 0,
        blocks_at_once=blocks.at_once if blocks is not None else 1,
    )


def _opened(
    generation: Generation, engine: Engine, plan: StepPlan, source: DataSource, weights: WeightsSettings | None
) -> tuple[StepLoop, AnomalyWatch | None, MicroBatchReader]:
    """The engine's state is opened and, when the spec names a checkpoint, restored, else `weights` go in; the
    data is opened where it stands. Collective.

    Raises UsageError, ModelMismatch, IntegrityError or StorageError.
    """
    scope = generation.scope
    state = open_state(engine)
    generation.closing.callback(state.close)
    cursor.require_equal(plan, scope.spec.seed, state.agreement)
    saved_step, readers = None, None
    if scope.spec.checkpoint is not None:
        plan, readers = resume(scope, state, plan, generation.state)
        # A snapshot in memory is not in storage yet: a run that ends here still has to save it.
        saved_step = None if is_snapshot(scope.spec.checkpoint) else scope.step
    elif weights is not None:
        scope.enter(Phase.RESTORING)
        state.begin_from(weights)
        scope.enter(Phase.BUILDING)
    reader = open_reader(source, plan, scope, generation.group.close_in_child(), readers)
    generation.closing.callback(reader.close)
    snapshots = Snapshots(
        scope,
        state,
        lambda: run_state(scope, plan, generation.state),
        saved_step,
        lambda: {} if (own := reader.states()) is None else {READERS: own.to_json()},
    )
    generation.closing.callback(snapshots.close)
    anomalies = scope.spec.anomalies
    watched = anomalies is not None and anomalies.policy != "off"
    watch = AnomalyWatch(engine, anomalies, state.agreement) if anomalies is not None and watched else None
    repeated = RepeatedSteps(scope.spec.content, state.agreement) if plan.stream else None
    return StepLoop(scope, plan, snapshots, generation.take_metrics, repeated), watch, reader

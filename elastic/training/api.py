"""What the training code calls: `initialize`, `prepare_data_loader`, `epochs`, `step`, `keep`, `busy`, `report`, ..."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from elastic.core.data.metrics import plain
from elastic.core.errors import UsageError
from elastic.core.settings import WeightsSettings
from elastic.engines.base import Config
from elastic.engines.model.pipeline import Pipeline
from elastic.training import context
from elastic.training.arguments import chosen_config, chosen_weights, refuse_arguments
from elastic.training.busy import reporting
from elastic.training.context import Context, StateOfTheRun
from elastic.training.data.data_loaders import PreparedLoader, data_source, taken_over
from elastic.training.data.loader import ElasticLoader, elapsing_epochs
from elastic.training.engine import ElasticEngine
from elastic.training.generation import Generation
from elastic.training.in_loop import kept
from elastic.training.in_loop.ahead import initializes, known_context
from elastic.training.in_loop.assembly import Given, assemble
from elastic.training.session import Phase

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
    tp_plan: Any = None,
    pipeline: Pipeline | None = None,
) -> tuple[ElasticEngine, Any, ElasticLoader, Any]:
    """`deepspeed.initialize`, elastic: returns (engine, optimizer, loader, scheduler).

    The arguments are DeepSpeed's, in its order. `training_data` is a map-style dataset, a torch DataLoader, a stream of
    `elastic.data` or a Hugging Face IterableDataset; without it, the loader given to `prepare_data_loader` is
    used. `config` is a DeepSpeed configuration, the path of one, or None for `args.deepspeed_config` or the job's own.
    `num_workers` and `prefetch_factor` are those of torch's DataLoader. `weights` is what a new run begins with: a
    folder (see `WeightsSettings`), or the job key `weights` as a dictionary. `tp_plan` says how FSDP2 cuts layers that
    ranks share, as torch's `parallelize_module` takes it; None for the model's own. `pipeline` makes an FSDP2 model a
    row of layers, which ranks may share out in stages. FSDP2 takes several optimizers, and schedulers, as lists. With a
    checkpoint to resume from, everything is restored when
    this returns, `elastic.state` included.

    Outside of a run (`python train.py`, torchrun) it trains as DeepSpeed would, at the world size that the environment
    gives, without saving.

    Raises UsageError (ModelMismatch for a checkpoint of another model).
    """
    refuse_arguments(args, model, mpu, mesh_param, distributed_port)
    parameters = None if model_parameters is None else list(model_parameters)

    def given_with(prepared: PreparedLoader | None, chosen: WeightsSettings | None) -> Given:
        data = training_data if prepared is None else prepared
        return Given(
            model,
            optimizer,
            lr_scheduler,
            parameters,
            chosen_config(args, config, config_params),
            data_source(data, collate_fn, num_workers, prefetch_factor),
            chosen,
            tp_plan,
            pipeline,
        )

    early = context.prepared_early()
    if context.waits() and not (early is None and training_data is None):
        initializes(given_with(early, None))
    generation = _generation()
    scope = generation.scope
    scope.check()
    if generation.has_engine:
        raise UsageError("elastic.initialize was called twice; one generation trains one engine")
    chosen = chosen_weights(weights, scope.spec)
    scope.enter(Phase.BUILDING)
    if generation.in_loop is not None:
        generation.in_loop.initializing()
    prepared = _prepared(generation, training_data)
    given = given_with(prepared, chosen)
    handles = assemble(generation, given)
    if prepared is not None:
        prepared.loader = handles.loader
    if generation.in_loop is not None:
        generation.in_loop.keep(given, handles)
    return handles.engine, handles.optimizer, handles.loader, handles.scheduler


def prepare_data_loader(loader: Any) -> PreparedLoader:
    """Make a torch DataLoader the run's elastic loader. Call it before `initialize`, which then needs no training_data.

    Dataset, collate_fn, workers and shuffling are taken over; the batch size is the micro-batch. A DistributedSampler
    is not needed, and does no harm. Raises UsageError for a sampler whose order cannot be kept, by name.
    """
    # Ahead of a generation nothing of it is needed: the function goes on to `initialize`.
    generation = None if context.waits() else _generation()
    if generation is not None and generation.has_engine:
        raise UsageError(
            "elastic.prepare_data_loader was called after elastic.initialize: call it before, or pass the DataLoader "
            "as training_data=; a DataLoader for evaluation needs no preparation"
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(f"elastic.prepare_data_loader takes a torch DataLoader, not a {type(loader).__qualname__}")
    prepared = PreparedLoader(taken_over(loader))
    if generation is None:
        before = context.prepare_early(prepared)
    else:
        before, generation.prepared = generation.prepared, prepared
    if before is not None:
        raise UsageError(
            "elastic.prepare_data_loader was called twice: prepare the training loader only; a DataLoader for "
            "evaluation needs no preparation"
        )
    return prepared


def epochs(count: int | None = None) -> Iterator[int]:
    """The epochs that are left of the run, below `count`: `for epoch in elastic.epochs(3): for batch in loader: ...`.

    Begins at the epoch that the run is in, so that after a recovery nothing is repeated that belongs to an earlier one.
    The job's `epochs` or `max_steps` end it too. Raises UsageError before `initialize`.
    """
    generation = _generation()
    if generation.loader is None or generation.steps is None:
        raise UsageError("elastic.epochs() comes after elastic.initialize(), which makes the loader")
    return elapsing_epochs(generation.loader, count)


def keep(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`make(*args, **kwargs)`, made once for each process: `data = elastic.keep(load_data, config)`.

    A training function that is called again gets the same object for the same function and equal arguments. For
    data, tokenizers and the like; not for models and optimizers. Raises UsageError for a function with a closure, and
    for arguments that cannot be copied and compared.
    """
    return kept.keep(make, args, kwargs)


def step() -> AbstractContextManager[None]:
    """`with elastic.step(): ...` around forward, backward and step: where a peer is lost in it, the block is left, and
    the loop continues with its next batch. Nothing is computed from outputs of an abandoned step.

    Without it such a step runs to its end: see docs/in-loop.md. Raises UsageError before `initialize`.
    """
    generation = _generation()
    if generation.engine is None:
        raise UsageError("elastic.step() comes after elastic.initialize(), which makes the engine")
    return generation.engine.leaving_failed_steps()


def busy(what: str, limit_s: float = 3600.0) -> AbstractContextManager[None]:
    """`with elastic.busy("evaluating"):` code in it may take `limit_s` without a step and is not taken for a hang.

    Not needed around code that calls the engine, the loader or this module every now and then, nor around code of the
    set-up that computes. A worker that does its set-up while the others train does not wait here.
    """
    return reporting(None if context.waits() else _generation().scope, what, limit_s)


def report(**metrics: Any) -> None:
    """Attach this rank's own metrics to the report of the current step (between two steps: of the one just finished).

    Values are numbers, text, None, tensors or arrays of one element, and lists and mappings of these. Raises UsageError
    for any other value, naming the metric.
    """
    generation = _generation()
    generation.scope.moved()
    generation.note({name: plain(name, value) for name, value in metrics.items()})


def get_context() -> Context:
    """Where this worker is now: rank, world size, generation, step, device, whether it resumed.

    On a worker that joins a run, while the others train, rank, world size and device are known; reading anything else
    waits for its generation.
    """
    if context.waits() and (known := known_context()) is not None:
        return context.early(known, _context_now)
    return _context_now()


# -- inside -----------------------------------------------------------------------------------------------------------


def _context_now() -> Context:
    generation = _generation()
    generation.scope.moved()
    found, in_loop, steps = Context.of(generation), generation.in_loop, generation.steps
    if in_loop is None:
        return found
    if steps is not None and steps.progress is not None:
        return context.watched(found, "step", in_loop.step_asked)
    return context.watched(found, "rank", in_loop.rank_asked)


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

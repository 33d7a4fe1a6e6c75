"""What the user gave to `elastic.initialize`, and how the engine of each generation is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from elastic.checkpoint.shares import Shares
from elastic.comm.agreement import Agreement
from elastic.core.checkpoint.snapshots import generation_of, is_snapshot
from elastic.core.data.adaptive_batch import Change, refused_adaptive
from elastic.core.data.audits import AuditPlan, refused_audit
from elastic.core.data.finite import FinitePlace
from elastic.core.data.micro_batches import refused_noise
from elastic.core.data.readers import READERS
from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.data.steps import StepReport
from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.server.continuing import Saved
from elastic.core.settings import WeightsSettings
from elastic.engines.base import Config, Engine, Pipelined, ResolvedConfig, UserObjects
from elastic.training.data import cursor
from elastic.training.data.blocks import InBlocks
from elastic.training.data.data_loaders import DataSource, open_reader
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.reader import MicroBatchReader
from elastic.training.data.stream.finite import Course, FiniteReader
from elastic.training.data.stream.repeated import RepeatedSteps
from elastic.training.data.stream.spec import Stream
from elastic.training.engine import ElasticEngine
from elastic.training.generation import Generation
from elastic.training.in_loop import unfinished
from elastic.training.in_loop.gradient_travel import reduce_gradients
from elastic.training.in_loop.island_state import LiveWeights
from elastic.training.in_loop.stand_in import StandIn
from elastic.training.in_loop.step_share import StepShare, Unfinished
from elastic.training.saving.requests import SaveRequests
from elastic.training.saving.resume import Resumed, catch_up, resume, run_state
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.session import Phase
from elastic.training.state.engine_state import open_state
from elastic.training.state.extra_state import read_alone
from elastic.training.state.weights.initial import load_whole
from elastic.training.step_loop import StepLoop
from elastic.training.user.comparison import Comparison
from elastic.training.user.first_values import require_first_values
from elastic.training.user.one_model import is_in_parts, require_one_model
from elastic.training.user.pipelined import PipelinedEngine, refuse_measures, require_pipeline
from elastic.training.user.startup import before_first_batch
from elastic.training.user.state import tensors_of
from elastic.training.watch.anomalies import AnomalyWatch
from elastic.training.watch.audits import Audits
from elastic.training.watch.memory_report import MemoryReport
from elastic.training.watch.sharing import EvaluationWatch


@dataclass(frozen=True)
class Given:
    """Arguments of `elastic.initialize`. `model_parameters` is a list: a generator can be read only once."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    model_parameters: Sequence[Any] | None
    config: Config | None
    source: DataSource
    # What the weights begin from, where no checkpoint is restored.
    weights: WeightsSettings | None = None
    tp_plan: Any = None
    pipeline: Any = None


@dataclass
class Handles:
    """What `elastic.initialize` returns. The objects stay while generations change underneath."""

    engine: ElasticEngine
    optimizer: Any
    loader: ElasticLoader
    scheduler: Any


def assemble(
    generation: Generation, given: Given, handles: Handles | None = None, held: Unfinished | None = None
) -> Handles:
    """Build the engine of `generation`, restore what its spec names, and open the handles on it: new ones, or those of
    an earlier generation, which has left `held` of its last step. Collective.

    Raises what `elastic.initialize` raises."""
    scope, source = generation.scope, given.source
    resolved = generation.kind.resolve(given.config, scope.spec, source.micro_batch)
    _refuse(scope.spec, resolved, given)
    require_first_values(given.model, scope.spec)
    _require_one_model(generation, given)
    nonfinite = scope.spec.anomalies.policy if scope.spec.anomalies is not None else None
    parameters = copied(given.model_parameters)
    generation.group.before_engine()
    engine, optimizer, scheduler = generation.kind.build(
        resolved,
        nonfinite if nonfinite != "off" else None,
        scope.device,
        UserObjects(given.model, given.optimizer, given.lr_scheduler, parameters, given.tp_plan, given.pipeline),
        generation.group.along("tp"),
    )
    generation.own(engine)
    if isinstance(engine, Pipelined):
        refuse_measures(scope.spec)
    shares = reduce_gradients(engine, scope, generation.group.connects_to)
    generation.closing.callback(shares.close)
    generation.group.seal()
    weights = given.weights if scope.spec.tp == 1 else None
    opened = _opened(generation, engine, _plan(scope.spec, resolved, source), source, weights, held, shares)
    if opened.steps.plan.rate_factor is not None:
        engine.scale_rates(lambda: opened.steps.rate_factor)
    if handles is None:
        handles = _new_handles(generation, given, engine, opened, optimizer, scheduler)
    else:
        handles.engine.open(
            engine, scope, opened.steps, generation.state, opened.share, opened.watch, opened.audit, opened.evaluations
        )
        handles.loader.open(scope, opened.steps, opened.reader)
        for handle, target in ((handles.optimizer, optimizer), (handles.scheduler, scheduler)):
            if type(handle) is StandIn:
                handle.stand_in_for(target)
    generation.began(opened.steps, handles.engine, handles.loader)
    return handles


@dataclass(frozen=True)
class _Opened:
    """What stands on the engine of a generation, from its first step to its last."""

    steps: StepLoop
    watch: AnomalyWatch | None
    audit: Audits | None
    reader: MicroBatchReader
    share: StepShare
    evaluations: EvaluationWatch | None


def _new_handles(
    generation: Generation, given: Given, engine: Engine, opened: _Opened, optimizer: Any, scheduler: Any
) -> Handles:
    scope, steps, in_loop = generation.scope, opened.steps, generation.in_loop
    made = PipelinedEngine if isinstance(engine, Pipelined) else ElasticEngine
    handles = Handles(
        made(
            engine,
            scope,
            steps,
            generation.state,
            opened.share,
            opened.watch,
            in_loop,
            opened.audit,
            opened.evaluations,
        ),
        _handle(optimizer, given.optimizer),
        ElasticLoader(scope, steps, opened.reader, given.source, in_loop),
        _handle(scheduler, given.lr_scheduler),
    )
    if isinstance(handles.engine, PipelinedEngine):
        handles.engine.reads(handles.loader)
    return handles


def _refuse(spec: GenerationSpec, resolved: ResolvedConfig, given: Given) -> None:
    """What cannot be had with this data or on this mesh. Raises UsageError."""
    streams, shared = isinstance(given.source.dataset, Stream), (spec.tp, spec.ep, spec.pp)
    if spec.noise_every_steps is not None:
        _raise(refused_noise(spec.sp, resolved.global_batch, resolved.micro_batch, *shared))
    if spec.audit_every_steps is not None:
        _raise(refused_audit(spec.sp, streams, *shared))
    if spec.pp > 1:
        require_pipeline(given.model, spec.pp, streams, spec.engine, given.pipeline)
    if spec.batch.adaptive is not None:
        late = spec.communication is not None and spec.communication.semantics in ("local", "async")
        rollback = spec.anomalies is not None and spec.anomalies.policy == "rollback"
        audited = spec.audit_every_steps is not None
        _raise(refused_adaptive(streams=streams, rollback=rollback, audited=audited, late=late))


def _raise(refused: str | None) -> None:
    if refused is not None:
        raise UsageError(refused)


def _require_one_model(generation: Generation, given: Given) -> None:
    """Where ranks have parts of the model, they are parts of the same one, whatever the seeds. Collective."""
    scope, begins = generation.scope, generation.scope.spec.checkpoint is None
    if scope.spec.tp > 1:
        if begins:
            if given.weights is not None:
                _load_whole(scope, given.model, given.weights)
            require_one_model(given.model, generation.group.along("tp"), scope.device)
    elif scope.spec.ep > 1 and begins and given.weights is None and not is_in_parts(given.model):
        require_one_model(given.model, dist.group.WORLD, scope.device)


def _load_whole(scope: GenerationScope, model: Any, weights: WeightsSettings) -> None:
    """Before the ranks cut it. Afterwards each has slices, which nobody reads by the names of a folder."""
    assert dist.group.WORLD is not None
    scope.enter(Phase.RESTORING)
    load_whole(model, weights, Agreement(dist.group.WORLD, scope.device))
    scope.enter(Phase.BUILDING)


def _handle(made: Any, given: Any) -> Any:
    """What is the user's own object is given back as it is."""
    return made if made is None or made is given else StandIn(made)


def copied(parameters: Sequence[Any] | None) -> list[Any] | None:
    """Optimizers write into the dictionaries of parameter groups that they are given."""
    if parameters is None:
        return None
    return [{**item, "params": list(item["params"])} if isinstance(item, Mapping) else item for item in parameters]


def _plan(spec: GenerationSpec, resolved: ResolvedConfig, source: DataSource) -> StepPlan:
    blocks = source.dataset if isinstance(source.dataset, InBlocks) else None
    stream = source.dataset if isinstance(source.dataset, Stream) else None
    # The job's epochs are those of the run: its readers do not begin anew by themselves.
    has_epochs = stream is not None and (not stream.repeat or spec.batch.epochs is not None)
    adaptive = spec.batch.adaptive
    return StepPlan(
        adaptive=adaptive,
        full_batch=resolved.full_batch,
        changes=(Change(0, 0, resolved.global_batch if adaptive is not None else 0),),
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        world_size=spec.mesh.dp,
        rank=spec.mesh.data(spec.rank),
        leads=spec.rank == spec.mesh.cell(spec.rank).start,
        dataset_size=source.size,
        total_samples=total_samples(
            source.size, resolved.global_batch, spec.batch.max_steps, spec.batch.epochs, spec.skips
        ),
        micro_steps=resolved.micro_steps,
        skips=spec.skips,
        shuffle=source.shuffle,
        stream=stream.facts if stream is not None else (),
        block=blocks.block if blocks is not None else 0,
        blocks_at_once=blocks.at_once if blocks is not None else 1,
        finite=FinitePlace(spec.batch.epochs) if has_epochs else None,
    )


def _opened(
    generation: Generation,
    engine: Engine,
    plan: StepPlan,
    source: DataSource,
    weights: WeightsSettings | None,
    held: Unfinished | None,
    shares: Shares,
) -> _Opened:
    """The engine's state is opened and, when the spec names a checkpoint, restored, else `weights` go in; the
    data is opened where it stands. Collective.

    Raises UsageError, ModelMismatch, IntegrityError or StorageError.
    """
    scope = generation.scope
    state = open_state(engine, scope.spec.mesh)
    generation.closing.callback(state.close)
    state.keep(shares)
    shares.begin(
        lambda: LiveWeights(state.sharded),
        lambda: steps.part(),
        lambda: (
            None
            if plan.stream
            else read_alone(engine, state.sharded, state.besides(), run_state(scope, plan, generation.state))
        ),
    )
    cursor.require_equal(plan, scope.spec.seed, state.agreement)
    saved_step, resumed = None, Resumed(plan)
    if scope.spec.checkpoint is not None:
        resumed = resume(scope, state, plan, generation.state, engine.module, held)
        plan = resumed.plan
        shares.install(state.restored)
        # A snapshot in memory is not in storage yet: a run that ends here still has to save it.
        saved_step = None if is_snapshot(scope.spec.checkpoint) else scope.step
    elif weights is not None:
        scope.enter(Phase.RESTORING)
        state.begin_from(weights)
        scope.enter(Phase.BUILDING)
    taken_over: list[StepReport] = []
    if not scope.spec.stops_at_start:
        checkpoint = scope.spec.checkpoint
        newer = shares.newer(Saved() if checkpoint is None else Saved(scope.step, generation_of(checkpoint)))
        resumed, taken_over = catch_up(scope, engine, state, resumed, generation.state, newer)
        plan, saved_step = resumed.plan, saved_step if newer is None else None
    audit = None
    if scope.spec.audit_every_steps is not None:
        turns = AuditPlan(scope.spec.audit_every_steps, scope.step, scope.spec.generation)
        plan, audit = replace(plan, audit=turns), Audits(engine, state.sharded, state.agreement, turns, scope.spec.seed)
    reader = open_reader(source, plan, scope, generation.group.close_in_child(), resumed.readers)
    generation.closing.callback(reader.close)
    course = Course(plan, reader, state.agreement) if isinstance(reader, FiniteReader) else None
    snapshots = Snapshots(
        scope,
        state,
        lambda: run_state(scope, plan if course is None else course.plan, generation.state),
        saved_step,
        lambda: {} if (own := reader.states()) is None else {READERS: own.to_json()},
        Comparison(scope, generation.state, state.lanes.own),
        shares,
    )
    generation.closing.callback(snapshots.close)
    requests = SaveRequests(scope, generation.state, snapshots, apart=type(shares) is not Shares)
    anomalies = scope.spec.anomalies
    watched = anomalies is not None and anomalies.policy != "off"
    watch = AnomalyWatch(engine, anomalies, state.agreement) if anomalies is not None and watched else None
    repeated = RepeatedSteps(scope.spec.content, state.agreement) if plan.stream else None
    state.kept = lambda: {**tensors_of(generation.state.captured), **shares.kept()}

    def before_first() -> None:
        before_first_batch(scope, generation.state, engine, state, source.dataset)

    carried = resumed.carried
    memory = MemoryReport(scope, state, plan) if scope.spec.reports_memory else None
    steps = StepLoop(
        scope, plan, snapshots, requests, generation.take_metrics, repeated, before_first, course, carried, shares,
        taken_over, None if memory is None else memory.step_closed,
    )  # fmt: skip
    # Nobody would take up what is kept of a function that is called again.
    refused = "" if generation.in_loop is None else unfinished.refused(plan, scope.spec)
    cell = generation.group.along("tp")
    evaluations = None if cell is None else EvaluationWatch(cell, scope.device)
    return _Opened(steps, watch, audit, reader, StepShare(engine, scope, refused, carried), evaluations)

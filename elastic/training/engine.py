"""The engine that the user holds: a training engine with the loss weighted, random streams set and steps reported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from elastic.comm.collective_ledger import CollectiveCall
from elastic.comm.device_stream import capturing
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.data.micro_batches import loss_scale
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import GenerationEnded, UsageError
from elastic.core.settings import WeightsSettings
from elastic.engines.base import Engine, StepOutcome
from elastic.engines.model.plain_names import modules_everywhere
from elastic.training import rng
from elastic.training.in_loop.passes import PassLog
from elastic.training.in_loop.step_share import StepShare, Unfinished
from elastic.training.result import BadStep
from elastic.training.scope import GenerationScope
from elastic.training.session import InLoop
from elastic.training.step_loop import StepLoop, StepProgress
from elastic.training.user import checkpoint_calls
from elastic.training.user.padding import PaddingBuffers
from elastic.training.user.rates import Rates, rates_of
from elastic.training.user.shown_ends import ShownEnds
from elastic.training.user.state import State
from elastic.training.watch.anomalies import AnomalyWatch
from elastic.training.watch.audits import Audits
from elastic.training.watch.sharing import EvaluationWatch, SharingWatch
from elastic.training.watch.step_measures import StepMeasures

_COUNTS_BATCHES = (
    "it has asked for engine.gradient_accumulation_steps() without a batch at hand, to count batches by, it seems: at "
    "another world size a step has another number; a loop over the loader stays, in which "
    "engine.is_gradient_accumulation_boundary() says where a step ends"
)


class ElasticEngine:
    """Every attribute that is not here is the underlying engine's own. That object itself is found under the engine's
    name: `engine.deepspeed` is the DeepSpeedEngine. The object stays while generations change: `close` and then `open`
    on the next one."""

    def __init__(
        self,
        engine: Engine,
        scope: GenerationScope,
        steps: StepLoop,
        state: State,
        share: StepShare,
        watch: AnomalyWatch | None = None,
        in_loop: InLoop | None = None,
        audit: Audits | None = None,
        evaluations: EvaluationWatch | None = None,
    ) -> None:
        self._in_loop = in_loop
        self._strict = False
        self._native_was_given = False
        # Why the user's function must be called again for another generation.
        self._begins_again: str | None = None
        # Packages that learn of this rank's changes: it does not matter that they have been told it before.
        self.followers: frozenset[str] = frozenset()
        self.shown_ends = ShownEnds()
        self._buffers = PaddingBuffers()
        self._rates = Rates()
        self._passes = PassLog()
        self._watch_calls: Callable[[CollectiveCall], None] | None = None
        self._measures = StepMeasures(scope.device)
        self.open(engine, scope, steps, state, share, watch, audit, evaluations)

    def open(
        self,
        engine: Engine,
        scope: GenerationScope,
        steps: StepLoop,
        state: State,
        share: StepShare,
        watch: AnomalyWatch | None,
        audit: Audits | None,
        evaluations: EvaluationWatch | None,
    ) -> None:
        self._engine: Engine | None = engine
        self._scope = scope
        self._steps = steps
        self._state = state
        self._watch = watch
        self._audit = audit
        self._evaluations = evaluations
        self._share: StepShare | None = share
        self._loss: torch.Tensor | float = share.loss
        self._grad_norm: float | None = None
        self._sharing = SharingWatch(scope.spec.sp)
        engine.ledger.watch = self._watch_calls
        self._rates.restored(rates_of(engine.native.optimizer) if scope.spec.checkpoint is not None else None)
        self._measures.open(engine, scope)

    @property
    def plan(self) -> StepPlan:
        return self._steps.plan

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":
            raise AttributeError(name)
        engine = self._engine
        if engine is None:
            raise AttributeError(f"{name}: the generation of this engine is over")
        self._scope.moved()
        if name == "global_steps" and self._in_loop is not None:
            self._in_loop.step_asked()
        if name == engine.name:
            self._native_was_given = True
            return engine.native
        return getattr(engine.native, name)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward pass. In training mode, with a batch of the loader at hand, its random stream is that of
        the micro-batch; evaluation passes keep their own.

        In a step that is abandoned (see docs/in-loop.md) it is the model's own pass or, where the weights are out of
        reach, zeros in the shape of the pass before.
        """
        try:
            return self._forward(inputs, kwargs)
        except (Exception, GenerationEnded) as error:
            if not self._training or not self._abandoned(error):
                raise
            return self._open().forward_alone(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check("forward")
        self._scope.moved()
        engine, progress, last = self._open(), self._steps.progress, None
        trained = progress is not None and progress.active is not None and engine.module.training
        if progress is not None and trained:
            self._passes.note(engine, inputs, kwargs)
            self._before_forward(progress)
            last = progress.on_last_batch
        with self._scope.translating(), self._measures.forward() if trained else nullcontext():
            if self._evaluations is not None and not trained:
                self._evaluations.look(self._scope.step, inputs, kwargs)
            return engine.forward(inputs, kwargs, last)

    def gathered(self) -> AbstractContextManager[None]:
        """See `engines.base.Engine`."""
        return self._open().gathered()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> Any:
        """`loss` is the mean over the micro-batch. It is scaled so that the step's gradient is exactly the mean over
        the global batch (see `core.data.micro_batches.loss_scale`). Returns what the underlying engine returns; the
        loss in a step that is abandoned."""
        try:
            return self._backward(loss, kwargs)
        except (Exception, GenerationEnded) as error:
            if not self._abandoned(error):
                raise
            return loss

    def _backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        self._check("backward")
        progress = self._steps.progress
        if progress is None or progress.active is None:
            raise UsageError(
                "engine.backward(loss) was called without a batch from the loader; iterate over the loader itself "
                "(itertools.cycle gives the batches of its first pass again: write `while True: for batch in loader`)"
            )
        if progress.backwards > 0:
            # DeepSpeed reduces in the backward of a step's last micro-batch: a second one would be lost (seen, ZeRO-2).
            raise UsageError(f"step {progress.step}: engine.backward was called twice for one batch; add the losses up")
        weight = progress.active.weight
        # An audit's pass is scaled as the original, so that it is rounded alike.
        scale = loss_scale(weight or progress.active.audited_weight, self.plan.micro_steps, self.plan.world_size)
        if weight > 0.0:
            # The ranks of a cell have the same loss, and each adds its part: the reports of all ranks are added up.
            self._loss = self._loss + loss.detach().float() * (weight / self._scope.spec.mesh.per_cell)
        progress.backwards += 1
        scaled = loss * scale if self._watch is None else self._watch.guarded(loss, scale)
        engine = self._open()
        if progress.forwards == 0:
            # The loss is of a pass in evaluation mode, or of the model itself.
            engine.ends_step(progress.on_last_batch)
        audited = nullcontext() if self._audit is None else self._audit.around(loss, progress.forwards)
        assert self._share is not None
        self._share.adding(progress.step, progress.active, self._loss, progress.tokens)
        with self._scope.translating(), audited, self._measures.backward(progress, scaled, scale):
            result = engine.backward(scaled, kwargs)
        if not progress.on_last_batch:
            self._share.added()
        self._buffers.restore()
        return result

    def step(self, *args: Any, **kwargs: Any) -> None:
        """After the last micro-batch of a step: the optimizer's step, the report, and the snapshot when it is due.
        Nothing in a step that is abandoned."""
        try:
            self._step(args, kwargs)
        except (Exception, GenerationEnded) as error:
            if not self._abandoned(error):
                raise

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check("step")
        progress = self._steps.progress
        if progress is None:
            raise UsageError("engine.step() was called without a batch from the loader; iterate over the loader")
        progress.require_backward()
        if progress.on_last_batch:
            if self._goes_to_vote(progress):
                return
            self._before_update()
        audited = None if not progress.on_last_batch else self._audit
        updating = nullcontext() if audited is None else audited.updating(self.plan, progress.step)
        with self._scope.translating(), updating:
            outcome = self._open().step(args, kwargs, self.plan.consumed(progress.step + 1))
        progress.finish_batch()
        if progress.complete:
            assert outcome is not None
            self._step_finished(progress, outcome)

    @property
    def batch_share(self) -> float:
        """The share of the global batch that the micro-batch at hand has; 0 for padding, and between two batches."""
        progress = self._steps.progress
        return 0.0 if progress is None or progress.active is None else progress.active.weight

    @property
    def step_loss(self) -> torch.Tensor | float:
        """This rank's part of the loss of the step at hand, up to now: at the end of the step, the parts of all ranks
        add up to the mean over the global batch. Those of micro-batches that were kept through a loss are in it."""
        return self._loss

    @property
    def abandoned(self) -> bool:
        """As `elastic.get_context().abandoned`."""
        return self._scope.broken

    def train_batch_size(self) -> int:
        """The global batch. DeepSpeed's own figure is nominal: it counts padding at sizes that do not divide."""
        return self.plan.global_batch

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of the whole gradient before clipping, in the step just made; None before the first.

        Also where DeepSpeed computes none for itself (ZeRO off): the watch for non-finite steps has it.
        """
        if self._grad_norm is not None:
            return self._grad_norm
        norm = self._open().native.get_global_grad_norm()
        return None if norm is None else float(norm)

    def clip(self, largest: float) -> None:
        """From the next update of this generation on gradients are clipped to this L2 norm; 0: not at all. Raises
        UsageError where the engine cannot, or a parameter server makes the updates."""
        travels = self._scope.spec.communication
        if travels is not None and travels.semantics == "async":
            raise UsageError(
                "with communication: {semantics: async} a parameter server makes the updates, as the configuration's "
                "gradient_clipping says: give it there"
            )
        self._open().clip(largest)

    def gradient_accumulation_steps(self) -> int:
        """Batches of a step on this rank, at this world size.

        A loop that asks without a batch at hand may take so many, from steps that have another number when the world
        size has changed, or that were abandoned half-way: its function is called again then.
        """
        progress = self._steps.progress
        if progress is None or progress.active is None:
            self.begin_again(_COUNTS_BATCHES)
        return int(self._open().native.gradient_accumulation_steps())

    def is_gradient_accumulation_boundary(self) -> bool:
        """What DeepSpeed answers at the same place: is the micro-batch at hand the last of its step?

        Between `step()` and the next batch: is the next micro-batch?
        """
        return self._steps.on_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Accepted where it says what is so: the platform sets the number of micro-batches per step.

        Raises UsageError otherwise.
        """
        if is_boundary != self._steps.on_boundary:
            raise UsageError(
                f"engine.set_gradient_accumulation_boundary({is_boundary}) contradicts the platform, which sets the "
                "number of micro-batches per step at every world size; remove the call"
            )

    def watch_collectives(self, watch: Callable[[CollectiveCall], None] | None) -> None:
        """`watch` is called with each of the engine's collectives when it is complete, in this and in later
        generations, on the thread that trains; on a device once the device has reached it, when a later step ends. It
        must not train. None ends it."""
        self._watch_calls = self._open().ledger.watch = watch

    def save_checkpoint(
        self,
        save_dir: Any = None,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """The platform's own save, of the last finished step; in the middle of a step, when it is finished.

        `client_state` is kept in elastic.state. Collective, as DeepSpeed's. Outside of a run it is DeepSpeed's own.
        False where the step is abandoned: nothing is saved of it.
        """
        if self._scope.coordinator.keeps_nothing:
            return bool(self._open().native.save_checkpoint(save_dir, tag, client_state or {}, *args, **kwargs))
        try:
            self._scope.check()
            checkpoint_calls.keep_client_state(self._state, self._scope, client_state)
            self._steps.ask_save()
        except (Exception, GenerationEnded) as error:
            if not self._abandoned(error):
                raise
            return False
        return True

    def follow_rank_0(self) -> None:
        """Between the batches of an epoch rank 0 alone may call `save_checkpoint`. On all ranks, before the first step.

        The first save may be of a later step than the one it is called after: it goes with the next snapshot in memory.
        """
        self._steps.follow_rank_0()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        """(checkpoint, client_state) of what `elastic.initialize` has restored already; (None, None) for a new run.

        Outside of a run it is DeepSpeed's own.
        """
        if self._scope.coordinator.keeps_nothing:
            path, client_state = self._open().native.load_checkpoint(*args, **kwargs)
            return path, client_state
        return checkpoint_calls.restored(self._state, self._scope)

    def load_weights(self, source: str | os.PathLike[str], allow_missing: Sequence[str] = ()) -> None:
        """After training: the model has the parameters and buffers in a folder, as `elastic.initialize(weights=...)`
        reads it, to be evaluated or written. The last step is saved first; the loader gives no batch any more.

        Collective. Raises UsageError inside a step, or for layers of which nobody knows how ranks share them (`tp`),
        and what `initialize` raises of a folder: ModelMismatch, IntegrityError, StorageError.
        """
        self._steps.load_weights(WeightsSettings(os.fspath(source), tuple(allow_missing)))

    def whole_weights(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Of the last finished step, the model's parameters and buffers as its state_dict has them without any mesh or
        sharding: on rank 0, in host memory and the model's dtypes; on other ranks empty. `names`: these alone, the same
        on all ranks; of tied parameters the first name.

        Collective, each tensor at a time whole on every device. Raises UsageError for layers of which nobody knows how
        ranks share them."""
        self._check("whole_weights")
        return self._steps.whole_weights(names)

    def close(self) -> None:
        """Drop the underlying engine. The user may still hold this object: it must not keep the shards alive."""
        progress = self._steps.progress
        if self._engine is not None and progress is not None and progress.next_batch > 0 and not progress.complete:
            self._rates.left(progress.step + 1, rates_of(self._engine.native.optimizer))
        self._engine = self._watch = self._audit = self._share = self._evaluations = None
        self._measures.close()
        self._steps.close()
        self._buffers.drop()
        self._loss = 0.0

    def begin_again(self, why: str) -> None:
        """The user's function holds what belongs to one generation: it is called again for the next one."""
        self._begins_again = why

    def unfinished(self) -> Unfinished | None:
        """What this rank has computed of the step that it is in, taken out of the engine; None for nothing."""
        measured = self._measures.needs_own_gradients(self._scope.step + 1)
        why = "its micro-batches are measured for the gradient noise" if measured else None
        return None if self._share is None else self._share.take(self._steps.plan.world_size, why)

    def obstacle(self) -> str | None:
        """Why no other engine can be built on the same model; None where one can, and where this one is closed."""
        if self._begins_again is not None and self._engine is not None:
            return self._begins_again
        if self._native_was_given and self._engine is not None:
            return f"it has used engine.{self._engine.name}, which belongs to one generation"
        return None if self._engine is None else self._engine.obstacle()

    @contextmanager
    def leaving_failed_steps(self) -> Iterator[None]:
        """A failure inside leaves the block; nothing in it is computed in an abandoned step. The modules train then, or
        do not, as before it: one that is left may have been in an evaluation."""
        before, self._strict = self._strict, True
        modes = [(module, module.training) for module in modules_everywhere(self._open().module)]
        try:
            yield
        except (Exception, GenerationEnded) as error:
            self._strict = before
            if not self._abandoned(error):
                raise
            for module, training in modes:
                module.training = training
        finally:
            self._strict = before

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _training(self) -> bool:
        """Evaluation passes are never invented: the function is left instead."""
        progress = self._steps.progress
        training: bool = self._engine is not None and self._engine.module.training
        return training and progress is not None and progress.active is not None

    def abandons(self, error: BaseException) -> bool:
        """A collective of the step at hand has failed outside of the calls above: is the step abandoned? Else `error`
        must be raised."""
        return self._training and self._abandoned(error)

    def _abandoned(self, error: BaseException) -> bool:
        return self._in_loop is not None and not self._strict and self._in_loop.abandon(error)

    def _check(self, call: str) -> None:
        """Raises what `GenerationScope.check` raises, and UsageError where the call would be recorded and not made."""
        self._scope.check()
        if capturing(self._scope.device):
            raise UsageError(
                f"engine.{call} was called while a CUDA graph is captured: a replay would train without reading "
                "samples, snapshots and reports, on addresses that the next generation does not have; capture modules "
                "inside of the model instead, after elastic.initialize (docs/gpu.md)"
            )

    def _open(self) -> Engine:
        if self._engine is None:
            raise UsageError("the generation of this engine is over")
        return self._engine

    def _before_forward(self, progress: StepProgress) -> None:
        batch = progress.active
        assert batch is not None
        if progress.at_first_forward and self._watch is not None:
            self._watch.begin()
        if batch.weight == 0.0:
            self._buffers.keep(self._open().module)
        if self._audit is not None and progress.forwards == 0:
            self._audit.begin(self.plan, progress.step, batch, progress.at_first_forward)
        spec = self._scope.spec
        part = spec.mesh.sequence(spec.rank)
        rng.seed_everything(*rng.forward_stream(spec.seed, progress.step, batch.index, progress.forwards, part))
        progress.forwards += 1

    def _before_update(self) -> None:
        progress = self._steps.progress
        assert progress is not None
        self._steps.before_update()
        # Those of the script and its scheduler, without what a batch of another size makes of them.
        rates, checkpoint, unequal = rates_of(self._open().native.optimizer), self._scope.spec.checkpoint, None
        if progress.step == 0:
            self._state.first_rates = rates
        resumed = checkpoint is not None and not is_snapshot(checkpoint)
        if self._in_loop is not None:
            unequal, resumed = self._steps.unequal, resumed and not self._in_loop.called_again
        self._rates.before_update(progress.step + 1, rates, self._state.first_rates, unequal, resumed)

    def _goes_to_vote(self, progress: StepProgress) -> bool:
        """Is an audit's verdict a pass of third ranks away, which the loader hands out next? Collective in an audited
        step. Raises GenerationEnded, on every rank, where a rank is wrong: its gradient is in the step's by now."""
        if self._audit is None:
            return False
        with self._scope.translating():
            settled = self._audit.settle(self.plan, progress.step)
        if settled.bad is not None:
            self._steps.go_back(settled.bad)
        if settled.again is not None:
            progress.batches += (settled.again,)
            progress.finish_batch()
        return settled.again is not None

    def _step_finished(self, progress: StepProgress, outcome: StepOutcome) -> None:
        # The step's last wait for its device: what was enqueued before, the optimizer's step too, is done then.
        loss, self._loss = float(self._loss), 0.0
        duration_s = time.perf_counter() - progress.begun
        # NCCL, aborted, lets what was enqueued run on over data that never came: nothing of such a step counts.
        self._scope.check()
        if (ledger := self._open().ledger).on_device:
            outcome = replace(outcome, collective_s=ledger.passed_s())
        self._sharing.look(outcome)
        bad = self._judged(loss, outcome)
        report = self._measures.report(progress, outcome, loss, bad, duration_s, self.plan.leads)
        if self._audit is not None:
            report = replace(report, audit=self._audit.take())
        self._grad_norm = report.grad_norm
        self._steps.step_finished(report, outcome.applied)
        self._passes.step_finished(self._scope)

    def _judged(self, loss: float, outcome: StepOutcome) -> BadStep | None:
        """What is wrong with the step just made, where it was skipped. Raises GenerationEnded, on every rank, where the
        run goes back to an earlier step: nothing of this one may be saved then."""
        watch, audit = self._watch, self._audit
        with self._scope.translating():
            bad = None if watch is None else watch.found(loss, outcome)
            refused = None if audit is None else audit.updated(self.plan, self._scope.step)
        if bad is not None and watch is not None and not watch.undo(outcome):
            self._steps.go_back(bad)
        if refused is not None:
            self._steps.go_back(refused)
        return bad

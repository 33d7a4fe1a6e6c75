"""The engine that the user holds: DeepSpeed's own, with the loss weighted, the random streams set and the step told."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from elastic.comm.failures import as_collective_failure
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.data.micro_batches import loss_scale
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.steps import StepReport
from elastic.core.errors import UsageError
from elastic.engines.deepspeed.collective_clock import CollectiveClock
from elastic.training import rng
from elastic.training.anomalies import AnomalyWatch
from elastic.training.context import Generation
from elastic.training.data import cursor
from elastic.training.progress import StepProgress
from elastic.training.result import BadStep
from elastic.training.session import Phase

if TYPE_CHECKING:
    from elastic.training.snapshots import Snapshots
    from elastic.training.state import EngineState

logger = logging.getLogger(__name__)


class ElasticEngine:
    """Everything that is not here is DeepSpeed's: attributes are looked up on `deepspeed`, its engine."""

    def __init__(self, engine: Any, generation: Generation, plan: StepPlan) -> None:
        self.deepspeed = engine
        self._generation = generation
        self.plan = plan
        self._state: EngineState | None = None
        self._loss: torch.Tensor | float = 0.0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._snapshots: Snapshots | None = None
        self._watch: AnomalyWatch | None = None
        self._clock = CollectiveClock()
        self._waited_s = 0.0

    def open(self) -> None:
        """Check DeepSpeed's partitioning and, when the spec names a checkpoint, restore it. Collective.

        `plan` is afterwards what the restored state goes on with. Raises UsageError, ModelMismatch, IntegrityError or
        StorageError.
        """
        from elastic.training.snapshots import Snapshots
        from elastic.training.state import open_state

        generation, checkpoint = self._generation, self._generation.spec.checkpoint
        if generation.spec.anomalies is not None:
            self._watch = AnomalyWatch(self.deepspeed, generation.spec.anomalies)
        self._clock.install(generation.device)
        self._state = open_state(self.deepspeed)
        group = self.deepspeed.seq_data_parallel_group
        self._snapshots = Snapshots(generation, self._state, group, self._client)
        if checkpoint is None:
            return
        generation.enter(Phase.RESTORING)
        report, client = self._state.restore(generation.coordinator.source(), checkpoint, later=True)
        cursor.check(client, self.plan, generation.spec.seed)
        self.plan = cursor.resumed(client, self.plan, generation.spec.batch)
        generation.step = int(client["step"])
        # What came from memory is not in storage yet: a run that ends here still has to save it.
        self._snapshots.saved_step = None if is_snapshot(checkpoint) else generation.step
        generation.state.load(client["user"])
        self._prove_place(client)
        generation.coordinator.restored(report)
        generation.enter(Phase.BUILDING)

    def _prove_place(self, saved: Mapping[str, Any]) -> None:
        """Counters, user state, and the samples and random streams of the next step. Collective."""
        assert self._state is not None
        here, kept = self._client(), dict(saved)
        if here["skips"] != saved.get("skips", []):
            # Samples that were left out since then move what comes next, which is the purpose of it.
            kept = {key: value for key, value in saved.items() if key not in ("skips", "position")}
        order = SampleOrder(self.plan.dataset_size, self._generation.spec.seed)
        self._state.prove_place(kept, here, self.plan, order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.deepspeed, name)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's forward. In training mode, with a batch of the loader at hand, its random stream is that of the
        micro-batch; evaluation passes are left alone."""
        self._generation.check()
        progress = self._progress()
        if progress is not None and progress.active is not None and self.deepspeed.training:
            self._before_forward(progress)
        with self._translated():
            return self.deepspeed(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> Any:
        """`loss` is the mean over the micro-batch. It is scaled so that the step's gradient is exactly the mean over
        the global batch (see core.batches.loss_scale); what DeepSpeed returns is returned."""
        self._generation.check()
        progress = self._progress()
        if progress is None or progress.active is None:
            raise UsageError(
                "engine.backward(loss) was called without a batch from the loader; iterate over the loader"
            )
        if progress.backwards > 0:
            # DeepSpeed reduces in the backward of a step's last micro-batch: a second one would be lost (seen, ZeRO-2).
            raise UsageError(f"step {progress.step}: engine.backward was called twice for one batch; add the losses up")
        weight = progress.active.weight
        scale = loss_scale(weight, self.plan.passes, self.plan.world_size)
        if weight > 0.0:
            self._loss = self._loss + loss.detach().float() * weight
        progress.backwards += 1
        scaled = loss * scale if self._watch is None else self._watch.guarded(loss, scale)
        with self._translated():
            result = self.deepspeed.backward(scaled, **kwargs)
        self._restore_buffers()
        return result

    def step(self, *args: Any, **kwargs: Any) -> None:
        """After the last micro-batch of a step: the optimizer's step, the report, and the snapshot when it is due."""
        self._generation.check()
        progress = self._progress()
        if progress is None:
            raise UsageError("engine.step() was called without a batch from the loader; iterate over the loader")
        progress.require_backward()
        assert self._snapshots is not None
        if progress.on_last_pass:
            assert self._state is not None
            # The last moment: nothing that was not proven good may change the weights.
            self._state.proven()
            progress.fenced_s += self._snapshots.fence()
        watched: AbstractContextManager[None] = nullcontext()
        if self._watch is not None and progress.on_last_pass:
            watched = self._watch.stepping()
        with self._translated(), watched:
            self.deepspeed.step(*args, **kwargs)
        progress.finish_pass()
        if progress.complete:
            self._step_finished(progress)

    def train_batch_size(self) -> int:
        """The global batch. DeepSpeed's own figure is nominal: it counts padding at sizes that do not divide."""
        return self.plan.global_batch

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "engine.save_checkpoint is not used here: the platform saves by itself every checkpoint_every_steps steps "
            "and at the end; keep your own small state in elastic.state"
        )

    def load_checkpoint(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "engine.load_checkpoint is not used here: elastic.initialize has restored the newest checkpoint already; "
            "start another run from one with `elastic resume RUN`"
        )

    def save_now(self, durable: bool = True) -> None:
        """Save the step just finished, unless it was saved already; to storage if `durable`. Between steps only."""
        assert self._snapshots is not None
        with self._translated():
            self._snapshots.at_end(durable)

    def let_go(self) -> None:
        """Drop DeepSpeed's engine. The user may still hold this object: it must not keep the shards alive."""
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
        self._clock.remove()
        self.deepspeed = None
        self._watch = None
        if self._state is not None:
            self._state.close()
            self._state = None
        self._buffers.clear()
        self._loss = 0.0

    # -- inside -------------------------------------------------------------------------------------------------------

    def _progress(self) -> StepProgress | None:
        loader = self._generation.loader
        return None if loader is None else loader.progress

    def _before_forward(self, progress: StepProgress) -> None:
        batch = progress.active
        assert batch is not None
        # Set by hand for every pass: the last step of a run may have fewer passes than DeepSpeed was told.
        self.deepspeed.set_gradient_accumulation_boundary(progress.on_last_pass)
        if progress.next_pass == 1 and progress.forwards == 0:
            self._waited_s = self._clock.waited_s
            if self._watch is not None:
                self._watch.begin()
        if batch.weight == 0.0 and not self._buffers:
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.deepspeed.module.buffers()]
        rng.seed_everything(
            *rng.forward_stream(self._generation.spec.seed, progress.step, batch.index, progress.forwards)
        )
        progress.forwards += 1

    def _restore_buffers(self) -> None:
        """After the backward of a padding pass: batch norm and the like must not have seen it. Not earlier, since the
        backward may run the forward again (activation checkpointing)."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._buffers.clear()

    def _step_finished(self, progress: StepProgress) -> None:
        generation = self._generation
        ended = time.perf_counter()
        own_s = ended - progress.begun - (self._clock.waited_s - self._waited_s) if self._clock.works else 0.0
        loss, self._loss = float(self._loss), 0.0
        # NCCL, aborted, lets what was enqueued run on over data that never came: nothing of such a step counts.
        generation.check()
        bad = self._look(progress, loss)
        generation.step = progress.step + 1
        self.deepspeed.global_samples = self.plan.consumed(generation.step)
        assert self._snapshots is not None
        with self._translated():
            stall_s = progress.fenced_s + self._snapshots.prepare(ended - progress.begun)
        metrics, generation.metrics = generation.metrics, {}
        report = self._report(progress, loss, bad)
        report = replace(report, duration_s=ended - progress.begun, own_s=own_s, save_stall_s=stall_s, metrics=metrics)
        generation.coordinator.step_done(report)
        self._snapshots.start()

    def _look(self, progress: StepProgress, loss: float) -> BadStep | None:
        """What is wrong with the step just made, where it was skipped. Raises GenerationEnded, on every rank, where the
        run is to go back: nothing of the step may be saved then."""
        if self._watch is None:
            return None
        with self._translated():
            bad = self._watch.found(loss)
        if bad is None or self._watch.undo():
            return bad
        generation = self._generation
        assert self._snapshots is not None
        # The step before may be where the run goes back to.
        self._snapshots.drain()
        generation.bad_step = replace(bad, positions=(self.plan.positions(progress.step),))
        generation.end(f"{bad} in step {progress.step + 1}")
        generation.check()
        return bad

    def _report(self, progress: StepProgress, loss: float, bad: BadStep | None) -> StepReport:
        """Without the times that the step took."""
        positions = progress.positions()
        norm = self.deepspeed.get_global_grad_norm() if self._watch is None else self._watch.grad_norm
        return StepReport(
            step=self._generation.step,
            loss=loss,
            positions=() if bad else positions,
            samples=sum(stop - start for start, stop in positions),
            duration_s=0.0,
            data_wait_s=progress.data_wait_s,
            grad_norm=_as_float(norm),
            learning_rates=_learning_rates(self.deepspeed),
            tokens=progress.tokens,
            anomaly=str(bad) if bad else "",
            skipped=positions if bad else (),
        )

    def _client(self) -> dict[str, Any]:
        generation = self._generation
        return {**cursor.told(self.plan, generation.spec.seed, generation.step), "user": generation.state.dump()}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """A lost peer is remembered, so that a loop which swallows the error does not go on with a broken group."""
        try:
            yield
        except Exception as error:
            failure = as_collective_failure(error, self._generation.where())
            if failure is None:
                raise
            if self._generation.failure is None:
                self._generation.failure = failure
            self._generation.check()
            raise failure from error


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _learning_rates(engine: Any) -> tuple[float, ...]:
    optimizer = engine.optimizer
    groups = getattr(optimizer, "param_groups", None) or []
    return tuple(float(group["lr"]) for group in groups if "lr" in group)

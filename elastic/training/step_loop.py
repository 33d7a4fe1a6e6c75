"""The steps of one rank: which micro-batch is in the user's hands, what a finished step means, and where steps end.

The loader takes micro-batches from it and the engine tells it what was done with them, so that neither knows the other.

A step is *finished* when the optimizer has made it, and *closed* when the loop asks for the next batch (or ends): what
the user's code does in between, such as updating an average of the weights, belongs to the step. Snapshots, saves and
reports are made when it is closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from elastic.checkpoint.shares import Shares, StepPart
from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.steps import StepReport
from elastic.core.errors import UsageError
from elastic.core.settings import WeightsSettings
from elastic.training.data.stream.finite import Course
from elastic.training.data.stream.repeated import RepeatedSteps
from elastic.training.in_loop.step_share import Unfinished
from elastic.training.result import BadStep
from elastic.training.saving.requests import SaveRequests
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.session import Phase, Stop

logger = logging.getLogger(__name__)

_OVER = "the generation of this engine and loader is over"


@dataclass
class StepProgress:
    """The current step: its micro-batches, which of them is in the user's hands, and what was summed up so far."""

    step: int
    batches: tuple[MicroBatch, ...]
    # Computed by this rank in an earlier generation; their tokens are counted.
    kept: tuple[MicroBatch, ...] = ()
    begun: float = field(default_factory=time.perf_counter)
    next_batch: int = 0
    active: MicroBatch | None = None
    forwards: int = 0
    backwards: int = 0
    data_wait_s: float = 0.0
    # Waiting until the copies of the step before are made, before the weights may change.
    fenced_s: float = 0.0
    tokens: int = 0
    # The sum of what was read from a stream; see `StepReport.content`.
    content: int = 0

    @property
    def complete(self) -> bool:
        return self.active is None and self.on_last_batch

    @property
    def on_last_batch(self) -> bool:
        return self.next_batch == len(self.batches)

    @property
    def at_first_forward(self) -> bool:
        return self.next_batch == 1 and self.forwards == 0

    @property
    def untouched(self) -> bool:
        """Nothing of the step is computed, and its first batch is at hand."""
        return self.at_first_forward and self.backwards == 0 and self.active is not None and not self.kept

    def hand_out(self) -> MicroBatch:
        """Hand the next micro-batch to the user. Raises UsageError when the one before was not finished."""
        self.require_stepped()
        self.active = self.batches[self.next_batch]
        self.next_batch += 1
        self.forwards = self.backwards = 0
        return self.active

    def require_stepped(self) -> None:
        if self.active is not None and not (self.forwards or self.backwards):
            raise UsageError(
                f"step {self.step}: the loader was asked for the next batch before engine.step(), and the one at hand "
                "has not been through the engine. A batch that the loader gives is trained on: len(loader) counts "
                "them, and another DataLoader shows them"
            )
        if self.active is not None:
            raise UsageError(
                f"step {self.step}: the loader was asked for the next batch before engine.step(); "
                "call engine.step() after every engine.backward(loss), as with DeepSpeed's gradient accumulation "
                "(the weights change at the last micro-batch of a step only)"
            )

    def require_backward(self) -> None:
        if self.active is None:
            raise UsageError("engine.step() was called without a batch from the loader; iterate over the loader")
        if self.backwards == 0:
            raise UsageError(f"step {self.step}: engine.step() came without engine.backward(loss) (no loss.backward())")

    def finish_batch(self) -> None:
        self.active = None

    def positions(self) -> tuple[tuple[int, int], ...]:
        """What this rank consumed with weight, as ranges in ascending order, neighbours joined."""
        joined: list[tuple[int, int]] = []
        for part in sorted((m.start, m.stop) for m in (*self.kept, *self.batches) if m.weight > 0):
            if joined and joined[-1][1] == part[0]:
                joined[-1] = (joined[-1][0], part[1])
            else:
                joined.append(part)
        return tuple(joined)


@dataclass(frozen=True)
class FinishedStep:
    """A step that the optimizer has made, or skipped where it was not `applied`, and that is not closed yet."""

    report: StepReport
    applied: bool
    fenced_s: float


class StepLoop:
    """`progress` is the current step, None before the first. `finished`: the run's last step is done and saved.

    `take_metrics` gives what the user's code has reported since it was last called; `before_first` is called once,
    before the first batch is handed out, `step_closed` after each step's report. `course`: of a stream with epochs,
    whose plan is made step by step.
    `carried`: what this rank has of the first step already. `shares` say after which steps the run may be saved.
    `taken_over`: what it reports of steps that were made in an earlier generation and are not done again.
    """

    def __init__(
        self,
        scope: GenerationScope,
        plan: StepPlan,
        snapshots: Snapshots,
        requests: SaveRequests,
        take_metrics: Callable[[], Mapping[str, Any]],
        repeated: RepeatedSteps | None = None,
        before_first: Callable[[], None] | None = None,
        course: Course | None = None,
        carried: Unfinished | None = None,
        shares: Shares | None = None,
        taken_over: Sequence[StepReport] = (),
        step_closed: Callable[[], None] | None = None,
    ) -> None:
        self._plan = plan
        self._taken_over = taken_over
        self._shares = shares or Shares()
        self._course = course
        self._kept, self._tokens = ((), 0) if carried is None else (carried.batches, carried.tokens)
        self.progress: StepProgress | None = None
        self.finished = False
        self._scope = scope
        self._snapshots: Snapshots | None = snapshots
        self._take_metrics = take_metrics
        self._before_first, self._step_closed = before_first, step_closed
        # The loop that runs over epochs ends the run: what it does after the last epoch belongs to the last step.
        self.ended_by_epochs = False
        self._repeated = repeated
        self._requests: SaveRequests | None = requests
        # By a function that has returned, here or elsewhere; its loop, which was left early, here or elsewhere.
        self._ended = False
        self.left = False
        # The weights are those of another step.
        self._loaded = False
        self._open_step: FinishedStep | None = None
        # Of the step after the last one that was closed.
        self._epoch_next: int | None = None

    @property
    def plan(self) -> StepPlan:
        """Of the step under way; between two steps, of the next one."""
        return self._plan if self._course is None else self._course.plan

    # -- for the loader ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._scope.step

    @property
    def epoch(self) -> int:
        """The epoch of the current step (of the next one, between two steps; of the last one at the run's end)."""
        last = self.plan.last_step
        return self.plan.epoch(self._scope.step if last is None else min(self._scope.step, last - 1))

    @property
    def over(self) -> bool:
        return self._ended or self.plan.over(self._scope.step)

    def advance(self, epoch: int | None = None) -> bool:
        """Get ready for the next micro-batch; closes the last step where it is complete, and begins the next.

        False where the run is over, its last step being saved then (not yet where `ended_by_epochs`), where the
        function has returned on another rank or has `left` its loop there, or where the next step is not of `epoch`:
        what the user's code does between two epochs belongs to the last step of the first.
        Raises GenerationEnded where the generation ends here, and UsageError where the last micro-batch was not
        finished.
        """
        self.left = False
        if self.finished:
            return False
        self._scope.check()
        if self._loaded:
            raise UsageError("the loader was asked for a batch after engine.load_weights, which ends the training")
        self.require_between_batches()
        if self.progress is None or self.progress.complete:
            begins = self.progress is None
            ends = not begins and self._over_anywhere()
            if self.left or not (ends or self._goes_on(epoch)):
                return False
            ends = ends or (begins and self._over_anywhere())
            self._close_step()
            if ends:
                self._save_last()
                return False
            if self._before_first is not None:
                before_first, self._before_first = self._before_first, None
                before_first()
            self._boundary()
            self._scope.enter(Phase.TRAINING)
            batches, kept, tokens = self.plan.deal(self._scope.step), self._kept, self._tokens
            self._kept, self._tokens = (), 0
            self.progress = StepProgress(self._scope.step, batches, kept, tokens=tokens)
        return True

    def last_batch_read(self) -> None:
        """The last micro-batch of a step is at hand: what comes next is agreed on while it is computed. Collective."""
        if self._course is not None:
            self._course.look_ahead()

    def leave(self) -> None:
        """The loop was left after a step, and collectives of the script follow: on other ranks it is left, too. The
        step is closed, and copied: the run may end with it, and what the script does to weights now is no part of it.
        To be called once. Collective."""
        if self.progress is None or not self.progress.complete or self.finished:
            return
        if not self.over:
            self._over_anywhere(left=True)
        elif not self.ended_by_epochs:
            self.finish()

    def pass_end(self) -> None:
        """The loop was left with the last step of an epoch, and comes back for the next one: ranks on which it was not
        have asked whether the run is over. Collective."""
        if self.progress is not None and self.progress.complete and not self.over:
            self._over_anywhere()

    def finish(self) -> None:
        """The run is over: close its last step and save it. Raises GenerationEnded where the generation ends here."""
        if not self.finished:
            self._scope.check()
            self._close_step()
            self._boundary()
            self._save_last()

    def require_between_batches(self) -> None:
        if self.progress is not None and not self._scope.broken:
            self.progress.require_stepped()

    # -- for the engine ------------------------------------------------------------------------------------------------

    def part(self) -> StepPart:
        """This rank's part of the step under way."""
        progress = self.progress
        assert progress is not None
        step = progress.step
        total = self.plan.consumed(step + 1) - self.plan.consumed(step)
        share = sum(batch.weight for batch in (*progress.kept, *progress.batches))
        return StepPart(step, share * total, total, self.plan.over(step + 1))

    @property
    def rate_factor(self) -> float:
        """Of the learning rate in the step under way."""
        factor, progress = self.plan.rate_factor, self.progress
        return 1.0 if factor is None or progress is None else factor(progress.step)

    def before_update(self) -> None:
        """The last moment before the weights change: what was restored must be verified, what is copied must be read.

        Collective while a verdict on the restored state is missing.
        """
        progress = self.progress
        assert progress is not None
        if self._repeated is not None:
            with self._scope.translating():
                self._repeated.check(progress.step + 1, self.plan.positions(progress.step)[0], progress.content)
        # Not the script's own: see `GenerationScope.of_script`.
        with self._scope.translating():
            progress.fenced_s += self._saving().before_update()

    def unequal(self, flag: bool, number: int) -> bool:
        """Is `flag` set on any rank, or is `number`, of 63 bits, not the same on all? Stages of a pipeline may have
        parameter groups of their own, and so other numbers. Collective; where it is so, all ranks know."""
        if self._scope.spec.pp > 1:
            number = 0
        with self._scope.translating():
            agreement = self._saving().agreement
            (flagged,), (differs,) = agreement.any_and_unequal([flag], [number])
        if found := flagged or differs:
            agreement.all_told()
        return found

    def step_finished(self, report: StepReport, applied: bool) -> None:
        """The optimizer has made the current step, or skipped it. It is closed when the loop comes back."""
        assert self.progress is not None
        if self._course is not None:
            with self._scope.translating():
                self._course.step_finished()
        self._scope.step = report.step
        # The loss was read, so the device has passed what delayed this step.
        fenced_s = self.progress.fenced_s + self._saving().delayed_s()
        self._open_step = FinishedStep(report, applied, fenced_s)

    @property
    def on_boundary(self) -> bool:
        """Is the micro-batch at hand the last of its step? Between two micro-batches: is the next one?"""
        progress = self.progress
        if progress is not None and progress.active is not None:
            return progress.on_last_batch
        if progress is not None and not progress.complete:
            return progress.next_batch + 1 == len(progress.batches)
        return (self.plan.micro_steps if self.over else len(self.plan.deal(self._scope.step))) == 1

    def follow_rank_0(self) -> None:
        """In saves within steps, for which rank 0 alone may ask. On all ranks, before the first step."""
        self._asking().follow_rank_0()

    def ask_save(self) -> None:
        """Save the current step, or the one just finished, when it is closed; a closed one at once. Collective. Where
        islands train by themselves, after the next outer step.

        Nothing before the first step: what was restored is saved, and a worker that has joined runs here through epochs
        that are over, while the others wait in their loop.
        """
        if self.progress is None:
            return
        if self._open_step is not None or not self.progress.complete or not self._shares.whole:
            self._asking().ask()
        elif self._scope.step > 0:
            self._save()

    def load_weights(self, weights: WeightsSettings) -> None:
        """After the last step, which is closed and saved first: none follows. Collective.

        Raises UsageError inside a step, GenerationEnded where the generation ends here, and what `install_weights`
        raises."""
        self._scope.check()
        self._leave("engine.load_weights was called")
        if self.over:
            self.finish()
        else:
            self._close_step()
            self._save()
        with self._scope.translating():
            self._saving().load_weights(weights)
        self._loaded = True

    def whole_weights(self, names: Collection[str] | None) -> dict[str, torch.Tensor]:
        """See `gather_whole`. Collective."""
        with self._scope.translating():
            return self._saving().whole_weights(names)

    def go_back(self, bad: BadStep) -> None:
        """The current step is not kept; the run resumes from an earlier one. Raises GenerationEnded, on every rank."""
        assert self.progress is not None
        # The step before may be where the run resumes.
        self._saving().drain()
        # The one whose gradient it is.
        step = self.progress.step - self._shares.late
        self._scope.end_for(replace(bad, positions=(self.plan.positions(step),)), step + 1)

    # -- for the runner ------------------------------------------------------------------------------------------------

    def returned(self) -> bool:
        """The user's function returned. True where that is the end of the run: its last step is done, or the function
        alone decides. Before the end the step is saved all the same, so that the run does not wait for a checkpoint in
        vain. Raises UsageError where the function returned inside a step."""
        if self.finished:
            return True
        self._leave("the training function returned")
        if self.over:
            self.finish()
        else:
            # First: a save that the function has asked for at its end is made where the step is closed.
            self._over_anywhere(returned=True)
            self._close_step()
            self._save()
            self.finished = not self.plan.bounded
        return self.finished

    def close(self) -> None:
        self._snapshots = self._requests = self._before_first = self._step_closed = None
        # It holds groups.
        self._shares = Shares()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _leave(self, what: str) -> None:
        """No batch is asked for any more. Raises UsageError, beginning with `what`, inside a step."""
        if self.progress is not None and self.progress.untouched:
            # `if step >= number: break` at the top of a loop: this step is not begun.
            self.progress = None
        self.require_between_batches()
        progress = self.progress
        if progress is not None and not progress.complete and progress.next_batch > 0:
            raise UsageError(
                f"{what} in the middle of step {progress.step}, after "
                f"{progress.next_batch} of {len(progress.batches)} batches; leave the loop between steps, for example "
                "when engine.is_gradient_accumulation_boundary() was true before engine.step()"
            )

    def _goes_on(self, epoch: int | None) -> bool:
        """Is there another step, of `epoch`? Collective where it begins an epoch of a stream, or the generation."""
        while True:
            if self.over:
                if not self.ended_by_epochs:
                    self.finish()
                return False
            if epoch is not None and self.epoch > epoch:
                # An earlier one, after a recovery: its steps are repeated in this iteration.
                return False
            if self._course is None or self._course.cut:
                return True
            with self._scope.translating():
                self._course.settle()

    def _close_step(self) -> None:
        """Take the snapshots that are due after the step just finished, report it, begin the copies. Collective."""
        done, self._open_step = self._open_step, None
        if done is None:
            return
        snapshots, requests = self._saving(), self._asking()
        requests.announce()
        with self._scope.translating():
            stall_s = done.fenced_s + snapshots.prepare(done.report.duration_s, done.applied, self._ended_epoch())
        report = replace(done.report, save_stall_s=stall_s, metrics=self._take_metrics())
        self._scope.coordinator.step_done(report)
        if self._step_closed is not None:
            self._step_closed()
        snapshots.start()
        with self._scope.translating():
            self._shares.closed(report)
            due = requests.due()
        if due and self._shares.whole:
            requests.made()
            self._save()

    def _ended_epoch(self) -> bool:
        """Was the step just finished the last of its epoch? False for the first of a generation."""
        before, self._epoch_next = self._epoch_next, self.epoch
        return before is not None and self.epoch > before

    def _boundary(self) -> None:
        """Ask whether the generation ends here as planned; if so, save exactly this step and leave."""
        stop = self._scope.coordinator.boundary(self._scope.step)
        reports, self._taken_over = self._taken_over, ()
        for report in reports:
            self._scope.coordinator.step_done(report)
            self._shares.closed(report)
        if stop is not None:
            self._save(durable=stop is not Stop.MEMORY)
            self._scope.end_as_planned(last=stop is Stop.LAST)

    def _over_anywhere(self, returned: bool = False, left: bool = False) -> bool:
        """Ends the run for all where the function has returned on one rank, here or elsewhere, and the iteration where
        it has left its loop. Collective.

        Only where nothing else ends it, and a counter of the function's own may differ: ranks have begun it in
        different generations, or have repeated different steps. Islands go apart.
        """
        goes_apart = type(self._shares) is not Shares
        if self.plan.bounded or goes_apart:
            return False
        if self._scope.spec.generation == 1:
            self.left = left
        else:
            with self._scope.translating():
                agreement = self._saving().agreement
                (self._ended, self.left), (differs,) = agreement.any_and_unequal([returned, left], [returned or left])
            if differs and self._scope.spec.rank == 0:
                what, ends = ("has returned", "run") if self._ended else ("has left its loop", "loop")
                logger.warning(
                    "the training function %s on some workers after step %d and not on others: it counts steps by "
                    "itself, and the %s ends here for all. Give the job max_steps, or count by "
                    "elastic.get_context().step", what, self._scope.step, ends,
                )  # fmt: skip
        if self.left:
            self._close_step()
            with self._scope.translating():
                self._saving().hold()
        return self._ended

    def _save_last(self) -> None:
        self._save()
        self.finished = True
        self._scope.coordinator.moved(over=True)

    def _save(self, durable: bool = True) -> None:
        """Save the step just finished, unless it was saved already; to storage if `durable`."""
        with self._scope.translating():
            if not self._shares.whole:
                self._shares.settle()
            self._saving().at_end(durable)

    def _saving(self) -> Snapshots:
        if self._snapshots is None:
            raise UsageError(_OVER)
        return self._snapshots

    def _asking(self) -> SaveRequests:
        if self._requests is None:
            raise UsageError(_OVER)
        return self._requests

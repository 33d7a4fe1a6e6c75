"""The loader that the user iterates over: this rank's micro-batches, from the restored step to the end of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import GenerationEnded, RunOver, UsageError
from elastic.training import rng
from elastic.training.data.data_loaders import DataSource
from elastic.training.data.reader import MicroBatchReader
from elastic.training.scope import GenerationScope
from elastic.training.session import InLoop
from elastic.training.step_loop import StepLoop, StepProgress

logger = logging.getLogger(__name__)

# Iterations after the end of the run that are taken for those of a `for epoch in range(...)`.
_MOST_EMPTY = 100


class ElasticLoader:
    """The k-th `for batch in loader` of a training function is epoch k of the run:

        for epoch in range(3):            # or elastic.epochs(3), which begins at the epoch that the run is in
            for batch in loader:
                ...

    A training function that begins again (after the loss of a node, say) finds the epochs before the present one empty,
    which is said once, and the rest of the present one. Where an iteration is left before its epoch ends (`break`,
    `itertools.islice`), the next iteration continues the same epoch: no sample is left out. A step that reaches over
    the end of an epoch belongs to the epoch in which it begins.
    """

    def __init__(
        self,
        scope: GenerationScope,
        steps: StepLoop,
        reader: MicroBatchReader,
        source: DataSource | None = None,
        in_loop: InLoop | None = None,
    ) -> None:
        self._source = source
        self._in_loop = in_loop
        # Batches given out, over all generations.
        self.given = 0
        self._by_epochs = False
        # A batch is all micro-batches of a step, for an engine that orders them by itself.
        self.by_steps = False
        # Micro-batches of a step that were read before they are given, by number.
        self._ahead: tuple[StepProgress | None, dict[int, Any]] = (None, {})
        self.open(scope, steps, reader)
        # The epoch of the next iteration: how many epochs the iterations of this function have used up.
        self._next_epoch = 0
        # Finished steps of the run at the end of the epoch before that, and of the one before.
        self._epoch_ended = self._ended_before = 0
        # The last iteration was left before it was told that its epoch is over.
        self._left_early = False
        # Of the iteration that was left by the script (`break`), until others have been told or the next one begins.
        self._left_in: int | None = None
        self._empty_in_a_row = 0

    def open(self, scope: GenerationScope, steps: StepLoop, reader: MicroBatchReader) -> None:
        """Go on with another generation."""
        self._scope, self._steps, self._reader = scope, steps, reader
        self._steps.ended_by_epochs = self._by_epochs

    @property
    def ended_by_epochs(self) -> bool:
        """See `StepLoop`."""
        return self._by_epochs

    @ended_by_epochs.setter
    def ended_by_epochs(self, value: bool) -> None:
        self._by_epochs = self._steps.ended_by_epochs = value

    @property
    def step_loop(self) -> StepLoop:
        """That of the current generation."""
        return self._steps

    @property
    def plan(self) -> StepPlan:
        return self._steps.plan

    @property
    def finished(self) -> bool:
        """Is the run over, its last step saved?"""
        return self._steps.finished

    @property
    def dataset(self) -> Any:
        """What samples are read from."""
        return self._source.dataset if self._source is not None else None

    @property
    def sampler(self) -> Any:
        """The sampler of the DataLoader that was taken over. Its `set_epoch` changes nothing: the run counts epochs."""
        return self._source.sampler if self._source is not None else None

    @property
    def batch_size(self) -> int:
        """Samples per batch, at most."""
        return self.plan.micro_batch

    @property
    def epoch(self) -> int:
        """The epoch of the current step (of the next one, between two steps)."""
        return self._steps.epoch

    @property
    def steps(self) -> int | None:
        """Optimizer steps in the whole run; None where neither the job's `max_steps` nor its `epochs` is given, and for
        epochs of a stream, whose length nobody knows."""
        return self.plan.last_step

    def __len__(self) -> int:
        """Batches of the next iteration's epoch (of the last one where the run is over) on this rank at this world
        size, padding included; of a pipeline, its steps. Raises TypeError for a stream, unless it is endless and the
        job has `max_steps`."""
        epoch = self._steps.epoch if self._steps.over else max(self._next_epoch, self._steps.epoch)
        batches = self.plan.batches_in(epoch)
        return -(-batches // self.plan.micro_steps) if self.by_steps else batches

    def __iter__(self) -> Iterator[Any]:
        self._steps.require_between_batches()
        return self._iteration()

    @property
    def never_came(self) -> bool:
        """Has this function had iterations but no batch, although there are steps to make, or were some of epochs that
        it has not come to? Its own end is elsewhere then."""
        step, plan = self._scope.step, self.plan
        if self.given or step == 0 or self._next_epoch == 0 or self._steps.over or plan.finite is not None:
            return False
        return plan.bounded or plan.epoch(step - 1) >= self._next_epoch

    def begin_epoch(self) -> int:
        """The next iteration is of the epoch that the run is in, which is returned."""
        self._next_epoch = self._steps.epoch
        return self._next_epoch

    def is_beyond(self, step: int) -> bool:
        """Has the loop left the epoch that the run is in after `step` finished steps?"""
        if self.plan.finite is None:
            return self.plan.epoch(step) < self._next_epoch
        # Epochs of a stream end where its readers do: no plan tells that of a step of the past.
        return step < self._epoch_ended

    def is_behind(self, step: int) -> bool:
        """May the run, after `step` finished steps that were made without this loop, be in a later epoch than that?"""
        return self.plan.finite is not None or self.plan.epoch(step) > self._next_epoch

    def again(self, epoch: int) -> bool:
        """Was what the script does after the steps of `epoch` left, since a peer was lost in it? The run goes on then,
        in its next generation, and that epoch is not over."""
        if self._in_loop is None or not self._scope.broken:
            return False
        self._next_epoch, self._epoch_ended = epoch, self._ended_before
        self._staying(self._still_here)
        return True

    def epochs(self) -> Iterator[Iterator[Any]]:
        """One iterable per epoch that is left, each to be used up before the next is asked for."""
        for _ in elapsing_epochs(self):
            yield iter(self)

    def leave_together(self) -> None:
        """Collectives of the script follow, on all ranks. Where its loop was left before it was told that its epoch is
        over, others may be in it still, by counters of their own: it is left there, too. Collective."""
        epoch, self._left_in = self._left_in, None
        if epoch is not None:
            self._steps.leave()

    def on_its_own(self) -> None:
        """From here on the user's code runs outside of the steps."""
        if self._in_loop is not None:
            self._in_loop.on_its_own()

    def ended_run(self) -> bool:
        """Is the run over? Its last step is saved then."""
        return self._staying(self._over_and_finished)

    def coming(self) -> list[tuple[MicroBatch, Any]]:
        """The micro-batches that are left of the step under way, with their contents. They are read now, and given
        afterwards as ever."""
        progress = self._steps.progress
        if progress is None:
            return []
        if self._ahead[0] is not progress:
            self._ahead = (progress, {})
        _, contents = self._ahead
        left = range(progress.next_batch, len(progress.batches))
        for number in left:
            if number not in contents:
                contents[number] = self._read(progress, number)
        return [(progress.batches[number], contents[number]) for number in left]

    def close(self) -> None:
        self._reader.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _iteration(self) -> Iterator[Any]:
        if self._left_early:
            # Perhaps after the very last batch of its epoch: then this one is the next epoch's.
            self._next_epoch = max(self._next_epoch, self._steps.epoch)
            if self._left_in is not None and self._left_in < self._next_epoch:
                self._staying(self._passed_end)
        epoch, began, given = self._next_epoch, self._scope.step, self.given
        self._left_in = None
        self._refuse_endless()
        if self._in_loop is not None:
            self._in_loop.comes_back()
        try:
            while self._staying(lambda: self._steps.advance(epoch)):
                self._empty_in_a_row, self._left_early = 0, True
                batch, last = self._next_batch(), self._on_last_batch
                self._scope.before_batch = self._scope.of_script()
                yield batch
                if self._in_loop is not None and not self._scope.broken:
                    self._in_loop.batch_over(self._scope.of_script_in_batch(), last)
                    self._scope.before_batch = None
            if self._steps.left:
                # As here: the epoch goes on with the next iteration.
                return
        except GeneratorExit:
            self._left_in = epoch
            raise
        finally:
            self.on_its_own()
        self._next_epoch, self._left_early = epoch + 1, False
        if self.given > given:
            self._ended_before, self._epoch_ended = self._epoch_ended, self._scope.step
        if self.finished:
            self._end()
        elif epoch == 0 and self._scope.step == began:
            # On all ranks: a worker that joins is never rank 0, and the others do not begin anew.
            logger.warning(
                "this training function began in epoch %d of the run: its iterations of earlier epochs are empty, and "
                "what it does after each is done again (`for epoch in elastic.epochs()` begins at the run's epoch)",
                self._steps.epoch,
            )

    @property
    def _on_last_batch(self) -> bool:
        progress = self._steps.progress
        return progress is None or progress.on_last_batch or self.by_steps

    def _staying(self, call: Callable[[], bool]) -> bool:
        """`call()`, again in the next generation where the present one ends here."""
        while True:
            try:
                return call()
            except (Exception, GenerationEnded) as error:
                if self._in_loop is None:
                    raise
                self._in_loop.recover(error)

    def _still_here(self) -> bool:
        self._scope.check()
        return True

    def _passed_end(self) -> bool:
        self._steps.pass_end()
        return True

    def _over_and_finished(self) -> bool:
        if self._steps.over:
            self._steps.finish()
            self._end()
        return self._steps.over

    def _end(self) -> None:
        """The run is over: nothing is read any more."""
        self.close()
        if self._source is not None:
            self._source.processes.close()

    def _refuse_endless(self) -> None:
        """`while True: for batch in loader` does not notice that the run is over."""
        self._empty_in_a_row += 1
        if self._steps.over and self._empty_in_a_row > _MOST_EMPTY:
            if self._scope.spec.rank == 0:
                logger.warning(
                    "the run is over after step %d and the training function loops on (`while True`): it is left, and "
                    "what stands after its loop does not run; `for epoch in elastic.epochs()` ends by itself",
                    self._scope.step,
                )
            raise RunOver(self._scope.step)

    def _next_batch(self) -> Any:
        progress = self._steps.progress
        assert progress is not None
        batch = progress.hand_out()
        self.given += 1
        if self.by_steps:
            return StepBatches(progress, self._read)
        number, (ahead, contents) = progress.next_batch - 1, self._ahead
        content = contents.pop(number) if ahead is progress and number in contents else self._read(progress, number)
        if progress.on_last_batch:
            self._steps.last_batch_read()
        # For what the user's loop draws between here and the forward pass.
        rng.seed_everything(self._scope.spec.seed, "loop", progress.step, batch.index)
        return content

    def _read(self, progress: StepProgress, number: int) -> Any:
        begun = time.perf_counter()
        content = self._reader.read(progress.batches, number)
        progress.data_wait_s += time.perf_counter() - begun
        if progress.batches[number].weight > 0 and self._steps.plan.leads:
            progress.tokens += _tokens(content)
            progress.content += self._reader.sum
        return content


class StepBatches:
    """The micro-batches of one step, for `engine.train_batch`, which reads those that its stage needs."""

    def __init__(self, progress: StepProgress, read: Callable[[StepProgress, int], Any]) -> None:
        self.progress = progress
        self._read = read

    def read(self, number: int) -> Any:
        return self._read(self.progress, number)


def elapsing_epochs(loader: ElasticLoader, count: int | None = None) -> Iterator[int]:
    """The number of each epoch that is left, below `count` and up to the end of the run.

    An epoch whose iteration was left early is given again, and so is one after whose steps `with elastic.step():` was
    left since a peer was lost. Raises UsageError for one that was not iterated over, and for a `count` where there are
    no epochs. The run is finished when the epoch after its last one is asked for.
    """
    if count is not None and loader.plan.endless:
        raise UsageError(
            f"elastic.epochs({count}): this stream has no epochs, each of its readers begins anew by itself; give "
            "elastic.data.stream(..., repeat=False), or the job's epochs"
        )
    loader.ended_by_epochs = True
    try:
        while not loader.ended_run() and (count is None or loader.epoch < count):
            before, epoch = loader.given, loader.begin_epoch()
            yield epoch
            given_again = loader.again(epoch)
            # A worker that joins begins in this epoch, too: what came after its steps is done by all.
            loader.on_its_own()
            if given_again:
                continue
            loader.step_loop.require_between_batches()
            if loader.given == before and not loader.step_loop.over:
                raise UsageError(f"epoch {epoch} was not iterated over before the next one was asked for")
    finally:
        loader.ended_by_epochs = False


def _tokens(content: Any) -> int:
    """Elements of the first integer tensor of two or more dimensions: for language models, the token ids."""
    if isinstance(content, torch.Tensor):
        whole = not content.is_floating_point() and not content.is_complex() and content.dtype is not torch.bool
        return content.numel() if whole and content.dim() >= 2 else 0
    values = content.values() if isinstance(content, dict) else content
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return 0
    return next((count for count in map(_tokens, values) if count), 0)

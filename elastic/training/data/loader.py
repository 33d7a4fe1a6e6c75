"""What the user iterates over: the micro-batches dealt to this rank, from the restored step to the end of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.training import rng
from elastic.training.context import Generation
from elastic.training.data.reader import BatchReader
from elastic.training.progress import StepProgress
from elastic.training.session import Phase, Stop


class ElasticLoader:
    """`for batch in loader` runs to the end of the run, over all epochs; `for epoch in loader.epochs(): for batch in
    epoch` gives the same batches epoch by epoch. Iterating again goes on where the last iteration stopped, so that
    `for epoch in range(n): for batch in loader` is harmless: later rounds are empty.

    A step that reaches over the end of an epoch belongs to the epoch in which it begins.
    """

    def __init__(self, generation: Generation, plan: StepPlan, reader: BatchReader) -> None:
        self._generation = generation
        self._reader = reader
        self.plan = plan
        self.progress: StepProgress | None = None
        self.finished = False

    @property
    def epoch(self) -> int:
        """The epoch of the step under way (or of the next one between two steps)."""
        return self.plan.epoch(min(self._generation.step, self.plan.last_step - 1))

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.plan.last_step

    def __len__(self) -> int:
        """Batches of the whole run on this rank at this world size, padding passes included."""
        full, rest = divmod(self.plan.total_samples, self.plan.global_batch)
        return full * self.plan.passes + (len(self.plan.deal(full)) if rest else 0)

    def __iter__(self) -> Iterator[Any]:
        self._require_between_passes()
        return self._batches(epoch=None)

    def epochs(self) -> Iterator[Iterator[Any]]:
        """One iterable per epoch that is left, each to be used up before the next is asked for."""
        while not self.finished:
            if self._generation.step >= self.plan.last_step:
                self._finish()
                return
            before = self._generation.step
            epoch = self.epoch
            yield self._batches(epoch)
            self._require_between_passes()
            if self._generation.step == before and not self.finished:
                raise UsageError(f"epoch {epoch} was not iterated over before the next one was asked for")

    def close(self) -> None:
        self._reader.close()

    def stopped_early(self) -> None:
        """The user's function returned before the end of the run. Raises UsageError if it did so inside a step."""
        self._require_between_passes()
        progress = self.progress
        if progress is not None and not progress.complete and progress.next_pass > 0:
            raise UsageError(
                f"the training function returned in the middle of step {progress.step}, after "
                f"{progress.next_pass} of {len(progress.passes)} batches; leave the loop between steps, for example "
                "when engine.is_gradient_accumulation_boundary() was true"
            )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _batches(self, epoch: int | None) -> Iterator[Any]:
        while not self.finished:
            self._generation.check()
            self._require_between_passes()
            if self.progress is None or self.progress.complete:
                if self._generation.step >= self.plan.last_step:
                    self._finish()
                    return
                if epoch is not None and self.epoch != epoch:
                    return
                self._begin_step()
            yield self._next_batch()

    def _begin_step(self) -> None:
        generation = self._generation
        self._boundary()
        generation.enter(Phase.TRAINING)
        self.progress = StepProgress(generation.step, self.plan.deal(generation.step))

    def _next_batch(self) -> Any:
        progress = self.progress
        assert progress is not None
        batch = progress.hand_out()
        begun = time.perf_counter()
        content = self._reader.read(progress.passes, progress.next_pass - 1)
        progress.data_wait_s += time.perf_counter() - begun
        if batch.weight > 0:
            progress.tokens += _tokens(content)
        # What the user's loop draws between here and the forward pass.
        rng.seed_everything(self._generation.spec.seed, "loop", progress.step, batch.index)
        return content

    def _boundary(self) -> None:
        """Ask whether the generation ends here as planned; if so, save exactly this step and leave."""
        generation = self._generation
        step = generation.step
        stop = generation.coordinator.boundary(step)
        if stop is not None:
            assert generation.engine is not None
            generation.engine.save_now(durable=stop is Stop.DURABLE)
            generation.planned = True
            generation.end(f"planned at step {step}")
            generation.check()

    def _finish(self) -> None:
        self._boundary()
        assert self._generation.engine is not None
        self._generation.engine.save_now()
        self.finished = True
        self.close()

    def _require_between_passes(self) -> None:
        if self.progress is not None:
            self.progress.require_stepped()


def _tokens(content: Any) -> int:
    """Elements of the first integer tensor of two or more dimensions: for language models, the token ids."""
    if isinstance(content, torch.Tensor):
        whole = not content.is_floating_point() and not content.is_complex() and content.dtype is not torch.bool
        return content.numel() if whole and content.dim() >= 2 else 0
    values = content.values() if isinstance(content, dict) else content
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return 0
    return next((count for count in map(_tokens, values) if count), 0)

"""The loader that the user iterates over: this rank's micro-batches, from the restored step to the end of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.training import rng
from elastic.training.data.data_loaders import DataSource
from elastic.training.data.reader import BatchReader
from elastic.training.scope import GenerationScope
from elastic.training.step_loop import StepLoop


class ElasticLoader:
    """`for batch in loader` runs to the end of the run, over all epochs; `for epoch in loader.epochs(): for batch in
    epoch` gives the same batches epoch by epoch. Iterating again continues where the last iteration stopped, so that
    `for epoch in range(n): for batch in loader` is harmless: later rounds are empty.

    A step that crosses the end of an epoch belongs to the epoch in which it begins.
    """

    def __init__(
        self, scope: GenerationScope, steps: StepLoop, reader: BatchReader, source: DataSource | None = None
    ) -> None:
        self._source = source
        self._scope = scope
        self._steps = steps
        self._reader = reader

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
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.plan.last_step

    def __len__(self) -> int:
        """Batches of the whole run on this rank at this world size, padding included."""
        full, rest = divmod(self.plan.total_samples, self.plan.global_batch)
        return full * self.plan.micro_steps + (len(self.plan.deal(full)) if rest else 0)

    def __iter__(self) -> Iterator[Any]:
        self._steps.require_between_batches()
        return self._batches(epoch=None)

    def epochs(self) -> Iterator[Iterator[Any]]:
        """One iterable per epoch that is left, each to be used up before the next is asked for."""
        while not self.finished:
            if self._steps.over:
                # Nothing is left but to save the last step.
                yield from self._batches(epoch=None)
                return
            before, epoch = self._scope.step, self.epoch
            yield self._batches(epoch)
            self._steps.require_between_batches()
            if self._scope.step == before and not self.finished:
                raise UsageError(f"epoch {epoch} was not iterated over before the next one was asked for")

    def close(self) -> None:
        self._reader.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _batches(self, epoch: int | None) -> Iterator[Any]:
        while self._steps.advance(epoch):
            yield self._next_batch()
        if self.finished:
            self.close()

    def _next_batch(self) -> Any:
        progress = self._steps.progress
        assert progress is not None
        batch = progress.hand_out()
        begun = time.perf_counter()
        content = self._reader.read(progress.batches, progress.next_batch - 1)
        progress.data_wait_s += time.perf_counter() - begun
        if batch.weight > 0:
            progress.tokens += _tokens(content)
        # For what the user's loop draws between here and the forward pass.
        rng.seed_everything(self._scope.spec.seed, "loop", progress.step, batch.index)
        return content


def _tokens(content: Any) -> int:
    """Elements of the first integer tensor of two or more dimensions: for language models, the token ids."""
    if isinstance(content, torch.Tensor):
        whole = not content.is_floating_point() and not content.is_complex() and content.dtype is not torch.bool
        return content.numel() if whole and content.dim() >= 2 else 0
    values = content.values() if isinstance(content, dict) else content
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return 0
    return next((count for count in map(_tokens, values) if count), 0)

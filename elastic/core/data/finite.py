"""Epochs of a stream, whose readers end in different steps: where the run stands, and how its next step is cut.

Nobody knows how long a stream is before it is read. So a step's cut is found just before it begins: every rank says how
many samples the readers that it owns have for it, at most `Slots.size` each, and the sum over the ranks is the cut. A
reader that is at its end gives a short micro-batch, then none. The epoch is over when no reader has a sample left, so
its last step is that in which its last reader ends; all readers begin the next epoch together.

The cut does not depend on the world size, nor does the ownership of a reader, which is that of a whole step. Positions
count the samples that there are: those of a step follow each other in the order of the readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.readers import owned
from elastic.core.errors import UsageError


@dataclass(frozen=True)
class FinitePlace:
    """Before step `step`: `samples` were trained on, `position` is that of the next one, in epoch `epoch` (all from 0).

    `cut` has the samples of each reader in this step; empty while the ranks have not agreed on them. `epochs` bounds
    the run; None: the training function does. `begun`: a sample of this epoch was seen.
    """

    epochs: int | None = None
    step: int = 0
    samples: int = 0
    position: int = 0
    epoch: int = 0
    cut: tuple[int, ...] = ()
    begun: bool = False

    @property
    def over(self) -> bool:
        """Are all epochs over?"""
        return self.epochs is not None and self.epoch >= self.epochs

    @property
    def end(self) -> int:
        """The position after the samples of the step at hand."""
        return self.position + sum(self.cut)

    def after_step(self) -> FinitePlace:
        """The step at hand is finished."""
        return replace(self, step=self.step + 1, samples=self.samples + sum(self.cut), position=self.end, cut=())

    def agreed(self, sizes: Sequence[int]) -> FinitePlace:
        """The ranks have these samples for the step at hand; where they have none, the next epoch begins.

        Raises UsageError for an epoch without any samples: a training loop would wait for them for ever.
        """
        if any(sizes):
            return replace(self, cut=tuple(sizes), begun=True)
        if not self.begun:
            raise UsageError(
                f"the stream has no samples in epoch {self.epoch}: none of its {len(sizes)} readers has given one; "
                "see what open(reader, readers) returns, and whether a sample of Pack is longer than a reader's tokens"
            )
        return replace(self, epoch=self.epoch + 1, begun=False)

    def left_out(self) -> FinitePlace:
        """The run leaves out the samples of this cut; the step at hand takes the next ones."""
        return replace(self, position=self.end, cut=())


def deal_cut(start: int, cut: Sequence[int], world_size: int, rank: int) -> tuple[MicroBatch, ...]:
    """The micro-batches of one rank in a step of `cut[i]` samples of reader i, from position `start` on; equally many
    on every rank.

    Over all ranks each position comes exactly once with a weight above zero, and the weights sum to one. A reader's
    owner is that of a whole step; readers without samples have no micro-batch.
    """
    readers, total = len(cut), sum(cut)
    begins = [start, *(start + count for count in accumulate(cut))]

    def numbered(index: int, weight: float) -> MicroBatch:
        return MicroBatch(index, begins[index], begins[index + 1], weight)

    def real(of: int) -> list[int]:
        return [index for index in owned(readers, world_size, of) if cut[index]]

    passes = max(len(real(of)) for of in range(world_size))
    mine = real(rank)
    # As in `deal`, real samples are repeated. A rank that has none repeats those of the step's first reader.
    spare = mine[-1] if mine else next(index for index in range(readers) if cut[index])
    padding = [numbered(spare, 0.0)] * (passes - len(mine))
    return tuple([numbered(index, cut[index] / total) for index in mine] + padding)

"""Steps of a stream that are done again after a loss: they must read what they read before."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.comm.agreement import Agreement
from elastic.core.errors import UsageError


class RepeatedSteps:
    """`known` is the content of completed steps beyond the checkpoint, by their first position."""

    def __init__(self, known: Mapping[int, int], agreement: Agreement) -> None:
        self._known = known
        self._agreement = agreement

    def check(self, step: int, position: int, content: int) -> None:
        """Before the optimizer step. Collective where the step is a repeated one. Raises UsageError on every rank."""
        before = self._known.get(position)
        if before is None:
            return
        (now,) = self._agreement.sums([content])
        if now != before:
            raise UsageError(
                f"step {step} is repeated and has read other samples than before ({now:016x}, it was {before:016x}): "
                "the stream is not deterministic, and nothing was trained on them. Random changes belong into "
                "transform=, which is seeded; the state of a source must be that after the document given last"
            )

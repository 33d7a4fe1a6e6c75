"""Collectives of the training loop's own, within its steps: does it take part in some steps and not in others?

`if i % 100 == 0: all_reduce(loss)` does so by a counter that a function begins anew when it is called. A worker that
joins would stand at another collective than those that stay in their loop: they would wait for each other, or gloo
would end a process. By the run's step (`elastic.get_context().step`) all ranks are at the same.
"""

from __future__ import annotations

APART = (
    "it takes part in collectives of its own in some steps and not in others, as by a counter, which a function that "
    "begins now counts from its beginning; one by elastic.get_context().step stays right"
)


class OwnCollectives:
    """Of one call of the function. Call order: `batch_over` after every batch that is followed by another one;
    `goes_on` for each later generation."""

    def __init__(self) -> None:
        # Has the loop asked for the run's step?
        self.by_step = False
        self.apart = False
        self._in_steps: set[int] = set()
        self._in_this = 0
        self._partial = False

    def goes_on(self) -> None:
        """With other ranks, on which a step may have another number of batches; the first may be the rest of one."""
        self._in_steps.clear()
        self._in_this, self._partial = 0, True

    def batch_over(self, count: int, last: bool) -> None:
        """`count`: collectives of the loop's own with this batch. `last`: of its step."""
        self._in_this += count
        if not last:
            return
        if not self._partial:
            self._in_steps.add(self._in_this)
        self._in_this, self._partial = 0, False
        self.apart = self.apart or len(self._in_steps) > 1

    @property
    def why(self) -> str:
        """Why such a function begins together with those of all other ranks; empty where it may stay."""
        return APART if self.apart and not self.by_step else ""

"""Collectives of the script's own: outside of its steps, or within them, in some and not in others?

`if i % 100 == 0: all_reduce(loss)` does so by a counter that a function begins anew when it is called. A worker that
joins would stand at another collective than those that stay in their loop: they would wait for each other, or gloo
would end a process. By the run's step (`elastic.get_context().step`) all ranks are at the same. So it is with one
before the first batch or between two epochs. Those that stay in their loop are at the same in either case.
"""

from __future__ import annotations

APART = (
    "it takes part in collectives of its own in some steps and not in others, as by a counter, which a function that "
    "begins now counts from its beginning; one by elastic.get_context().step stays right"
)


UNSURE = (
    "it takes part in collectives of its own, and has made too few steps to tell whether it does so in each of them "
    "or, by a counter, in some"
)
# Steps of one generation that are alike.
_ENOUGH = 2


class OwnCollectives:
    """Of one call of the function; what is known of the call `before` holds for it. Call order: `batch_over` after
    every batch that is followed by another one; `broken` for one that came to no end; `goes_on` for each later
    generation."""

    def __init__(self, before: OwnCollectives | None = None) -> None:
        # Has the loop asked for the run's step?
        self.by_step: bool = before is not None and before.by_step
        self.apart: bool = before is not None and before.apart
        # Why a worker that joins begins with all others: what the script does outside of its steps.
        self.outside: str = "" if before is None else before.outside
        # Has it made any, has it made a step without, and enough steps to tell?
        self._any, self._none, self.sure = False, False, False
        self._in_steps: list[int] = []
        self._in_this = 0
        self._partial = False

    def goes_on(self) -> None:
        """With other ranks, on which a step may have another number of batches; the first may be the rest of one."""
        self._in_steps.clear()
        self._in_this, self._partial = 0, True

    def batch_over(self, count: int, last: bool) -> None:
        """`count`: collectives of the loop's own with this batch. `last`: of its step."""
        self._in_this += count
        self._any = self._any or count > 0
        if not last:
            return
        if not self._partial:
            self._in_steps.append(self._in_this)
            self._none = self._none or self._in_this == 0
        self._in_this, self._partial = 0, False
        self._compare()
        self.sure = self.sure or len(self._in_steps) >= _ENOUGH

    def broken(self, count: int) -> None:
        """It may have stood at a collective to which others did not come."""
        self._any = self._any or count > 0
        more = bool(self._in_steps) and self._in_this + count > max(self._in_steps)
        self.apart = self.apart or more
        self._compare()

    def _compare(self) -> None:
        """Some and none are not the same with any number of batches."""
        self.apart = self.apart or len(set(self._in_steps)) > 1 or (self._any and self._none)

    @property
    def why(self) -> str:
        """Why a function that begins needs those of all other ranks to begin with it; empty where they may stay."""
        return self.outside or (APART if self.apart and not self.by_step else "")

    @property
    def unsure(self) -> str:
        """The same, where no rank is sure that it may stay."""
        return UNSURE if self._any and not self.sure and not self.by_step else ""

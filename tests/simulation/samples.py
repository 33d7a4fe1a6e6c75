"""What a simulated state has been trained on: the truth that the rules about skipped samples are held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.core.data.micro_batches import step_positions
from elastic.core.data.steps import Range, join, union

BATCH = 10


@dataclass(frozen=True)
class Samples:
    """`consumed` by steps that were applied, `passed` by steps that were not, `skips` that the run leaves out.

    Ranges that touch are one; positions that came twice stay visible.
    """

    consumed: tuple[Range, ...] = ()
    passed: tuple[Range, ...] = ()
    skips: tuple[Range, ...] = ()

    def begin(self, skips: tuple[Range, ...]) -> Samples:
        """A generation begins from this state, which knows itself what it has left out."""
        self.disjoint(skips)
        end = max((stop for _, stop in (*self.consumed, *self.passed)), default=0)
        return replace(self, skips=union((*skips, *(skip for skip in self.skips if skip[0] < end))))

    def consume(self, positions: Range) -> Samples:
        return replace(self, consumed=join((*self.consumed, positions)))

    def pass_over(self, positions: Range) -> Samples:
        return replace(self, passed=join((*self.passed, positions)))

    def disjoint(self, skips: Iterable[Range]) -> None:
        behind = self.meets(skips)
        assert not behind, f"a state that has seen {behind} is good although they are left out"

    def meets(self, skips: Iterable[Range]) -> list[Range]:
        """What is to be left out and was seen all the same."""
        seen = (*self.consumed, *self.passed)
        return [skip for skip in skips if any(start < skip[1] and skip[0] < stop for start, stop in seen)]

    def of_step(self, step: int) -> Range:
        """The positions of the step after `step` finished ones: what comes next, once."""
        positions = step_positions(step, BATCH, None, self.skips)
        before = join(r for r in (*self.consumed, *self.passed, *self.skips) if r[0] < positions[0])
        assert before == (((0, positions[0]),) if positions[0] else ()), f"step {step} takes {positions} after {before}"
        return positions

    def each_once(self, skips: tuple[Range, ...], bad_batches: Iterable[int]) -> None:
        """Every sample up to here was consumed or left out, once, and nothing bad was consumed."""
        end = max((stop for _, stop in (*self.consumed, *self.passed)), default=0)
        left_out = union((*skips, *self.skips))
        everything = join([*self.consumed, *self.passed, *(skip for skip in left_out if skip[0] < end)])
        assert everything in ((), ((0, end),)), f"{everything} is not every sample up to {end}, once"
        for batch in bad_batches:
            trained = any(start <= batch * BATCH < stop for start, stop in self.consumed)
            assert not trained, f"bad batch {batch} was trained on"

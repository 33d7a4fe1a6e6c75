"""The samples that a simulated state was trained on: the reference for the rules about skipped samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.core.data.micro_batches import step_positions
from elastic.core.data.steps import Range, join, union

BATCH = 10


@dataclass(frozen=True)
class Samples:
    """`consumed`: by applied steps. `passed`: by steps that were not applied. `skips`: ranges that the run skips.

    Adjacent ranges are joined; positions that were consumed twice remain visible.
    """

    consumed: tuple[Range, ...] = ()
    passed: tuple[Range, ...] = ()
    skips: tuple[Range, ...] = ()

    def begin(self, skips: tuple[Range, ...]) -> Samples:
        """A generation begins from this state, which has its own record of skipped samples."""
        self.disjoint(skips)
        end = max((stop for _, stop in (*self.consumed, *self.passed)), default=0)
        return replace(self, skips=union((*skips, *(skip for skip in self.skips if skip[0] < end))))

    def consume(self, positions: Range) -> Samples:
        return replace(self, consumed=join((*self.consumed, positions)))

    def pass_over(self, positions: Range) -> Samples:
        return replace(self, passed=join((*self.passed, positions)))

    def disjoint(self, skips: Iterable[Range]) -> None:
        behind = self.meets(skips)
        assert not behind, f"a state that was trained on {behind} is used although these samples are skipped"

    def meets(self, skips: Iterable[Range]) -> list[Range]:
        """The ranges of `skips` that this state has consumed or passed nevertheless."""
        seen = (*self.consumed, *self.passed)
        return [skip for skip in skips if any(start < skip[1] and skip[0] < stop for start, stop in seen)]

    def of_step(self, step: int) -> Range:
        """The positions of the step after `step` finished ones: the next samples, each once."""
        positions = step_positions(step, BATCH, None, self.skips)
        before = join(r for r in (*self.consumed, *self.passed, *self.skips) if r[0] < positions[0])
        assert before == (((0, positions[0]),) if positions[0] else ()), f"step {step} takes {positions} after {before}"
        return positions

    def each_once(self, skips: tuple[Range, ...], bad_batches: Iterable[int]) -> None:
        """Every sample so far was consumed or skipped exactly once, and no bad batch was consumed."""
        end = max((stop for _, stop in (*self.consumed, *self.passed)), default=0)
        left_out = union((*skips, *self.skips))
        everything = join([*self.consumed, *self.passed, *(skip for skip in left_out if skip[0] < end)])
        assert everything in ((), ((0, end),)), f"{everything} is not every sample up to {end}, once"
        for batch in bad_batches:
            trained = any(start <= batch * BATCH < stop for start, stop in self.consumed)
            assert not trained, f"bad batch {batch} was trained on"

"""What a simulated state has been trained on: the truth that the rules about skipped samples are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic.core.batches import step_positions
from elastic.core.steps import Range, join

BATCH = 10


@dataclass
class Samples:
    """`consumed` by steps that were applied, `passed` by steps that were not, `skips` that the run leaves out."""

    consumed: list[Range] = field(default_factory=list)
    passed: list[Range] = field(default_factory=list)
    skips: tuple[Range, ...] = ()

    def copy(self) -> Samples:
        return Samples(list(self.consumed), list(self.passed), self.skips)

    def begin(self, skips: tuple[Range, ...]) -> Samples:
        """A generation begins from this state."""
        self.disjoint(skips)
        return Samples(list(self.consumed), list(self.passed), skips)

    def disjoint(self, skips: Iterable[Range]) -> None:
        for start, stop in skips:
            behind = [r for r in (*self.consumed, *self.passed) if r[0] < stop and start < r[1]]
            assert not behind, f"a state that has seen {behind} is good although {start}-{stop} is left out"

    def of_step(self, step: int) -> Range:
        """The positions of the step after `step` finished ones: what comes next, once."""
        positions = step_positions(step, BATCH, None, self.skips)
        before = [r for r in (*self.consumed, *self.passed, *self.skips) if r[0] < positions[0]]
        reached = join(before)
        assert reached in ((), ((0, positions[0]),)), f"step {step} takes {positions} after {reached}"
        assert reached or positions[0] == 0
        assert sum(stop - start for start, stop in before) == positions[0], f"samples before {positions} come twice"
        return positions

    def each_once(self, skips: tuple[Range, ...], is_bad: Callable[[Range], bool]) -> None:
        """Every sample up to here was consumed or left out, once, and nothing bad was consumed."""
        end = max((stop for _, stop in (*self.consumed, *self.passed)), default=0)
        everything = [*self.consumed, *self.passed, *((start, stop) for start, stop in skips if start < end)]
        assert join(everything) in ((), ((0, end),)), f"{join(everything)} is not every sample up to {end}"
        assert sum(stop - start for start, stop in everything) == end, "a sample was consumed twice"
        fresh = [r for r in self.consumed if r[1] - r[0] == BATCH]
        assert not any(map(is_bad, fresh)), "a bad batch was trained on"

"""The ledger of samples: which positions of the global order the run has trained on, on its final timeline, and which
it has skipped on purpose."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.core.data.steps import Range, union


@dataclass(frozen=True)
class SampleCount:
    """Positions of [0, total): `seen` at least once, `skipped` on purpose and never seen, `missing`, and `repeated`
    (consumptions beyond the first).

    `outside` counts consumptions at or beyond `total`. `gaps` are the missing ranges, at most ten of them.
    """

    seen: int
    missing: int
    repeated: int
    outside: int = 0
    gaps: tuple[Range, ...] = ()
    skipped: int = 0

    @property
    def each_once(self) -> bool:
        return not (self.missing or self.repeated or self.outside)


@dataclass(frozen=True)
class _Stretch:
    """Steps first .. first + count - 1, of which each consumed the next `size` positions from `start` on."""

    first: int
    count: int
    start: int
    size: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def end(self) -> int:
        return self.start + self.count * self.size


@dataclass
class SampleLedger:
    """Which positions of the global sample order the steps of the final timeline consumed.

    Steps that follow each other with the same batch are one entry, so a month of training fits in a few; anything
    irregular is kept as it came.
    """

    _stretches: list[_Stretch] = field(default_factory=list)
    _odd: dict[int, tuple[Range, ...]] = field(default_factory=dict)
    _skips: tuple[Range, ...] = ()
    _passed: dict[int, tuple[Range, ...]] = field(default_factory=dict)

    @property
    def skips(self) -> tuple[Range, ...]:
        """The ranges that the run leaves out, as sorted, non-adjacent ranges."""
        return self._skips

    def skip(self, ranges: Iterable[Range]) -> None:
        """All ranges that the run leaves out, whatever is rolled back: the whole list, which only grows."""
        self._skips = union(ranges)

    def add(self, step: int, positions: Iterable[Range], skipped: Iterable[Range] = ()) -> bool:
        """Step `step` consumed these positions, and had `skipped` without being applied. False, and nothing changes,
        if the step is known already."""
        if step in self._odd or self._known(step):
            return False
        passed = tuple((start, end) for start, end in skipped if start < end)
        if passed:
            self._passed[step] = passed
        ranges = tuple((start, end) for start, end in positions if start < end)
        last = self._stretches[-1] if self._stretches else None
        if len(ranges) != 1 or (last is not None and step <= last.last):
            self._odd[step] = ranges
            return True
        start, size = ranges[0][0], ranges[0][1] - ranges[0][0]
        if last is not None and (last.last + 1, last.end, last.size) == (step, start, size):
            self._stretches[-1] = _Stretch(last.first, last.count + 1, last.start, size)
        else:
            self._stretches.append(_Stretch(step, 1, start, size))
        return True

    def rollback(self, to_step: int) -> None:
        """The run continues after step `to_step`: later steps have not happened."""
        self._odd = {step: ranges for step, ranges in self._odd.items() if step <= to_step}
        self._passed = {step: ranges for step, ranges in self._passed.items() if step <= to_step}
        while self._stretches and self._stretches[-1].last > to_step:
            last = self._stretches.pop()
            if last.first <= to_step:
                self._stretches.append(_Stretch(last.first, to_step - last.first + 1, last.start, last.size))

    def end(self) -> int:
        """One past the highest position that was consumed or skipped."""
        return max((end for _, end in [*self._ranges(), *self._skipped()]), default=0)

    def result(self, total: int) -> SampleCount:
        """Compare with [0, total), each position once. A position that was skipped and consumed counts as repeated."""
        consumed, skipped = self._ranges(), self._skipped()
        seen, _, _ = _cover(consumed, total)
        covered, times, gaps = _cover([*consumed, *skipped], total)
        outside = sum(max(0, stop - max(start, total)) for start, stop in consumed)
        return SampleCount(seen, total - covered, times - covered, outside, gaps[:10], covered - seen)

    def _skipped(self) -> list[Range]:
        return [*self._skips, *(range_ for ranges in self._passed.values() for range_ in ranges)]

    def _ranges(self) -> list[Range]:
        odd = [range_ for ranges in self._odd.values() for range_ in ranges]
        return odd + [(stretch.start, stretch.end) for stretch in self._stretches]

    def _known(self, step: int) -> bool:
        place = bisect_right(self._stretches, step, key=lambda stretch: stretch.first)
        return place > 0 and step <= self._stretches[place - 1].last


def _cover(ranges: Iterable[Range], total: int) -> tuple[int, int, tuple[Range, ...]]:
    """(positions of [0, total) that are in some range, sum of the ranges' lengths in it, what is in none)."""
    reached, distinct, times = 0, 0, 0
    gaps: list[Range] = []
    for start, stop in sorted(ranges):
        end = min(stop, total)
        if start >= end:
            continue
        times += end - start
        if start > reached:
            gaps.append((reached, start))
        distinct += max(0, end - max(start, reached))
        reached = max(reached, end)
    if reached < total:
        gaps.append((reached, total))
    return distinct, times, tuple(gaps)

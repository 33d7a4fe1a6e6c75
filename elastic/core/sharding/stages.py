"""Where a row of layers is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from elastic.core.errors import UsageError


def balanced(costs: Sequence[int], trained: Sequence[bool], stages: int) -> tuple[int, ...]:
    """The first layer of each of `stages` stages, such that the most expensive stage is as cheap as can be, and each
    has a layer with trained parameters. Of equal cuts the one with the earliest places.

    Raises UsageError where there are fewer such layers than stages.
    """
    if sum(trained) < stages:
        raise UsageError(
            f"{stages} stages need {stages} layers with trained parameters, and the pipeline has {sum(trained)}"
        )
    total, weighty = [0, *accumulate(costs)], [0, *accumulate(map(int, trained))]
    count = len(costs)
    # Of the layers from `begin` on, in so many stages: the most expensive stage, and where the second one begins.
    best = [
        [(total[count] - total[begin], count) if weighty[count] > weighty[begin] else None for begin in range(count)]
    ]
    for _ in range(stages - 1):
        row: list[tuple[int, int] | None] = []
        for begin in range(count):
            row.append(_first_cut(begin, total, weighty, best[-1]))
        best.append(row)
    begins, begin = [], 0
    for left in range(stages - 1, -1, -1):
        begins.append(begin)
        found = best[left][begin]
        assert found is not None
        begin = found[1]
    return tuple(begins)


def _first_cut(
    begin: int, total: Sequence[int], weighty: Sequence[int], rest: Sequence[tuple[int, int] | None]
) -> tuple[int, int] | None:
    found: tuple[int, int] | None = None
    for end in range(begin + 1, len(rest)):
        after = rest[end]
        if after is None or weighty[end] == weighty[begin]:
            continue
        cost = max(total[end] - total[begin], after[0])
        if found is None or cost < found[0]:
            found = (cost, end)
    return found

"""Where a row of layers is cut into the stages of a pipeline, which rank has which, and in which order it computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from elastic.core.errors import UsageError

# (stage, whether forward, micro-batch)
Action = tuple[int, bool, int]


def stages_that_fit(asked: int, ranks: int, layers: int) -> int:
    """How many stages each of `ranks` has, of `asked` at most and 1 at least, where each stage needs one of so many
    layers. A single rank has one: it has nobody to share with."""
    return max(1, min(asked, layers // ranks)) if ranks > 1 else 1


def holders(ranks: int, per_rank: int, back: bool = False) -> tuple[int, ...]:
    """The rank that has each stage: they go round, or with `back` there and back again, so that the last rank has two
    neighbouring ones."""
    there = range(ranks)
    turns = (there[::-1] if back and turn % 2 else there for turn in range(per_rank))
    return tuple(rank for turn in turns for rank in turn)


def interleaved(ranks: int, per_rank: int, micro_batches: int) -> list[list[Action]]:
    """The interleaved 1F1B order (Narayanan et al. 2021) of each rank, for any number of micro-batches.

    They go through all stages in rounds of at least `ranks` (fewer where there are no more), which differ by one at
    most. The longest comes first: a rank computes as many forward passes ahead as the first round needs.
    """
    rounds = _rounds(ranks, micro_batches)
    found = []
    for rank in range(ranks):
        stages = range(rank, ranks * per_rank, ranks)
        forward = [(stage, True, batch) for batches in rounds for stage in stages for batch in batches]
        backward = [(stage, False, batch) for batches in rounds for stage in reversed(stages) for batch in batches]
        ahead = min((per_rank - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank), len(forward))
        pairs = zip(forward[ahead:], backward, strict=False)
        paired = [action for pair in pairs for action in pair]
        found.append([*forward[:ahead], *paired, *backward[len(forward) - ahead :]])
    return found


def _rounds(ranks: int, micro_batches: int) -> list[range]:
    count = max(1, micro_batches // ranks)
    low, more = divmod(micro_batches, count)
    ends = list(accumulate(low + (number < more) for number in range(count)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


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
        if found is not None and total[end] - total[begin] >= found[0]:
            # Of more layers this stage alone would be as expensive.
            break
        after = rest[end]
        if after is None or weighty[end] == weighty[begin]:
            continue
        cost = max(total[end] - total[begin], after[0])
        if found is None or cost < found[0]:
            found = (cost, end)
    return found

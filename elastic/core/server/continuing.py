"""From which update a run can go on, of what its servers still hold when a generation was lost: pure.

Every copy of a shard says which versions it can give: from the last update but one, whose state it keeps, to the one
that all gradients are there for. A version counts when each shard has a copy that gives it and every rank has said what
its step was: with its last gradient of step n a rank has closed step n - 1, so that at most the newest update is not
among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeldCopy:
    """A server's copy of a shard of `shards`, as the generation `epoch` of `ranks` ranks has left it. It gives the
    state after `first` to `last` updates. `closed`: the steps that all ranks have closed, where this shard knows."""

    epoch: int
    shard: int
    shards: int
    ranks: int
    first: int
    last: int
    closed: tuple[int, ...] = ()
    # By version, of as many of the last and of the next updates as are known: see `scales_of`.
    squares: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Whole:
    """The state after `version` updates of generation `epoch`; `holders[shard]` is a server that has it."""

    epoch: int
    version: int
    ranks: int
    holders: tuple[str, ...]
    squares: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True)
class Saved:
    """A snapshot or checkpoint by its step and the generation that saved it; None: the run's beginning."""

    step: int = 0
    generation: int | None = None


def wholes(held: Mapping[str, Sequence[HeldCopy]]) -> Iterator[Whole]:
    """Of each generation that servers know of, the newest one first: its newest state, where all of that is there.
    `held` is by server."""
    for epoch in sorted({copy.epoch for own in held.values() for copy in own}, reverse=True):
        whole = _newest([(name, copy) for name, own in held.items() for copy in own if copy.epoch == epoch])
        if whole is not None:
            yield whole


def _newest(copies: Sequence[tuple[str, HeldCopy]]) -> Whole | None:
    some = copies[0][1]
    for version in sorted({step for _, copy in copies for step in copy.closed}, reverse=True):
        found = {copy.shard: (name, copy) for name, copy in reversed(copies) if copy.first <= version <= copy.last}
        if found.keys() == set(range(some.shards)):
            chosen = [found[shard] for shard in range(some.shards)]
            holders, squares = (name for name, _ in chosen), (copy.squares for _, copy in chosen)
            return Whole(some.epoch, version, some.ranks, tuple(holders), tuple(squares))
    return None


def scales_of(squares: Sequence[Mapping[int, float]], clip: float) -> dict[int, float]:
    """By which factor each update's gradient is clipped to the norm `clip` (0: to none), where all shards know the
    square of its norm in their part. The same on every rank, bit for bit: in the order of the shards."""
    if clip <= 0.0:
        return {}
    known = set(squares[0]).intersection(*squares[1:])
    norms = {version: math.sqrt(sum(own[version] for own in squares)) for version in known}
    # As torch.nn.utils.clip_grad_norm_.
    return {version: min(1.0, clip / (norm + 1e-6)) for version, norm in norms.items()}


def goes_on_from(whole: Whole, origin: Saved, saved: Saved) -> bool:
    """Is `whole`, of a generation that was restored from `origin`, what followed `saved`?"""
    own = saved.generation == whole.epoch and saved.step > origin.step
    return whole.version > saved.step and (saved == origin or own)

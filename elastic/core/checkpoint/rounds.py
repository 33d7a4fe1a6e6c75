"""Training in rounds: which ranks are an island, when islands exchange what, and where a run may stop.

Pure: every rank, and the controller, come to the same from the number of finished steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.settings import CommunicationSettings

LOCAL_SGD, DILOCO, STREAMING = "local_sgd", "diloco", "streaming_diloco"
PARAMETER_SERVER = "parameter_server"


@dataclass(frozen=True)
class Rounds:
    """Every parameter is exchanged once in `every` steps; the parameters in `fragments` parts, one after the other, as
    far apart as can be. What is exchanged is there `overlap` steps later.

    `own_weights`: islands' own weights are saved too, so that a run may stop where they differ.
    """

    every: int = 1
    fragments: int = 1
    overlap: int = 0
    own_weights: bool = False

    @classmethod
    def of(cls, settings: CommunicationSettings | None) -> Rounds:
        if settings is None or settings.semantics not in ("local", "async"):
            return cls()
        if settings.semantics == "async":
            # Without a delay nothing is under way between two steps. What servers keep is taken at the end of a round.
            served = settings.strategy == PARAMETER_SERVER
            return cls(settings.every_steps if settings.staleness or served else 1)
        if settings.strategy != STREAMING:
            return cls(settings.every_steps)
        return cls(settings.every_steps, settings.fragments, settings.overlap_steps, own_weights=True)

    @property
    def gap(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments

    def begins(self, step: int) -> int | None:
        """The fragment whose exchange begins after `step` finished steps; None: none does."""
        return None if step % self.gap else (step // self.gap - 1) % self.fragments

    def outer_steps(self, after: int, until: int) -> list[int]:
        """The steps later than `after`, up to `until`, with which an exchange begins."""
        return [step for step in range(after + 1, until + 1) if self.begins(step) is not None]

    def next_whole(self, step: int) -> int:
        """The first number of finished steps, from `step` on, after which a run may stop and be saved."""
        if not self.own_weights:
            return -(-step // self.every) * self.every
        since = step % self.gap
        return step + self.overlap - since if step >= self.gap and since < self.overlap else step

    @property
    def longest_wait(self) -> int:
        """Steps from a wish to stop to the step that the run may stop after, at most; each may take as long as one step
        to a stop may take otherwise."""
        return 1 + (self.overlap if self.own_weights else self.every - 1)


def islands_of(nodes: Sequence[int], count: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each island, that of rank 0 first. `nodes[rank]` is the rank's node; without `count` each node is an
    island. Nodes stay whole where there are at least `count`; there are never more islands than ranks."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    wholes = list(by_node.values())
    if count is None:
        return tuple(map(tuple, wholes))
    if count > len(wholes):
        wholes = [[rank] for own in wholes for rank in own]
    count = min(count, len(wholes))
    found: list[tuple[int, ...]] = [()] * count
    for number, own in enumerate(wholes):
        found[number * count // len(wholes)] += tuple(own)
    return tuple(found)

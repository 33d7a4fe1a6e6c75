"""Readers of a stream: reader i feeds micro-batch i of every step, so which rank reads what follows from the deal.

A step is cut into R = ceil(global batch / micro-batch) micro-batches before the world size is looked at. With one
reader for each of them, `deal` decides who owns a reader, a resize moves states of readers and no data, and positions
count a stream's samples as they count those of a dataset: sample `count` of reader i is one position, and only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.data.micro_batches import micro_batches_in
from elastic.core.errors import IntegrityError, Where

MODULUS = 1 << 64
# The key under which the states of a rank's readers travel with its shard, and those of all in a manifest.
READERS = "readers"


@dataclass(frozen=True)
class Slots:
    """The readers of a run. Every step of a stream is whole: `global_batch` samples, of which reader i gives `size(i)`.

    A position is (block of `global_batch` positions, place in it). Ranges that a run skips are whole blocks, so a step
    may take its samples from a later block than its number says; a reader then drops what lies between.
    """

    global_batch: int
    micro_batch: int

    @property
    def readers(self) -> int:
        return micro_batches_in(self.global_batch, self.micro_batch)

    def size(self, reader: int) -> int:
        """Samples of this reader in each step; the last reader's may be fewer than `micro_batch`."""
        return min(self.micro_batch, self.global_batch - reader * self.micro_batch)

    def place(self, position: int) -> tuple[int, int]:
        """(reader, count): the position is sample `count` (from 0) of `reader`."""
        block, within = divmod(position, self.global_batch)
        reader = within // self.micro_batch
        return reader, block * self.size(reader) + within % self.micro_batch

    def position(self, reader: int, count: int) -> int:
        """The inverse of `place`."""
        block, within = divmod(count, self.size(reader))
        return block * self.global_batch + reader * self.micro_batch + within


def owned(readers: int, world_size: int, rank: int) -> range:
    """The readers of a rank: those of the micro-batches that `deal` gives it in a whole step."""
    return range(rank * readers // world_size, (rank + 1) * readers // world_size)


@dataclass(frozen=True)
class ReaderStates:
    """States of some of a run's `total` readers, as JSON, by reader: what one rank owns, or all of them."""

    total: int
    states: Mapping[int, Any]

    def to_json(self) -> dict[str, Any]:
        return {"total": self.total, "states": {str(reader): state for reader, state in self.states.items()}}

    @classmethod
    def from_json(cls, data: Any) -> ReaderStates:
        """The inverse of `to_json`. Raises IntegrityError for anything else."""
        try:
            return cls(int(data["total"]), {int(reader): state for reader, state in data["states"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"the states of a stream's readers cannot be read: {error!r}") from error


def merged(by_rank: Iterable[tuple[int, ReaderStates | None]]) -> ReaderStates | None:
    """The states of all readers from what each rank owns; None for a run without a stream.

    Raises IntegrityError where ranks disagree on the number of readers, or where a reader's state is missing, doubled
    or of no reader of the run.
    """
    parts = list(by_rank)
    if all(part is None for _, part in parts):
        return None
    total = next(part.total for _, part in parts if part is not None)
    states: dict[int, Any] = {}
    owner: dict[int, int] = {}
    for rank, part in parts:
        if part is None or part.total != total:
            found = "no reader states" if part is None else f"states of {part.total} readers"
            raise IntegrityError(f"rank {rank} has {found}, another rank has states of {total}", Where(rank=rank))
        for reader, state in part.states.items():
            if not 0 <= reader < total:
                raise IntegrityError(f"reader {reader} is none of {total} readers", Where(rank=rank))
            if reader in states:
                raise IntegrityError(f"ranks {owner[reader]} and {rank} both have a state of reader {reader}")
            states[reader], owner[reader] = state, rank
    missing = [reader for reader in range(total) if reader not in states][:8]
    if missing:
        raise IntegrityError(f"of {total} readers, the states of {missing} are missing")
    return ReaderStates(total, dict(sorted(states.items())))

"""Small collectives over the data group: ranks compare numbers, and raise the same error together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from elastic.core.errors import (
    CollectiveFailed,
    ElasticError,
    IntegrityError,
    ModelMismatch,
    StorageError,
    UsageError,
    Where,
)

# In order of precedence: a user's mistake is reported before broken data, and that before storage that may come back.
_CLASSES: tuple[type[ElasticError], ...] = (ModelMismatch, UsageError, IntegrityError, StorageError, CollectiveFailed)


class Agreement:
    """Verdicts shared over the ranks of `group`; tensors are exchanged on `device`. Every method is collective.

    Raises what torch.distributed raises when a peer is lost: a DistError, or a RuntimeError of gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @property
    def ranks(self) -> list[int]:
        """What the run calls the ranks of the group, in their order."""
        return dist.get_process_group_ranks(self._group)

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Returns when no rank had an error; else raises on all: the same class, naming the lowest failing rank."""
        flags = torch.zeros(len(_CLASSES), dtype=torch.int64)
        if error is not None:
            # The largest flag wins the reduction: that of the lowest rank.
            flags[_class_of(error)] = self.world_size - self.rank
        worst = self._reduce(flags, "MAX")
        for number, kind in enumerate(_CLASSES):
            if worst[number] > 0:
                rank = self.world_size - worst[number]
                if error is not None and rank == self.rank:
                    raise error
                raise self._verdict(kind, rank, error, doing) from error

    def sums_later(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """As `sums`: begun now, and waited for by the function that is returned. It also raises what went wrong
        here."""
        if not values:
            return list
        signed = [value - (1 << 64) if value >= 1 << 63 else value for value in (v % (1 << 64) for v in values)]
        summed = torch.tensor(signed, dtype=torch.int64).to(self._device)
        try:
            work = dist.all_reduce(summed, group=self._group, async_op=True)
        except RuntimeError as error:
            return partial(_raise, error)

        def wait() -> list[int]:
            if work is not None:
                work.wait()
            return [int(value) % (1 << 64) for value in summed.cpu().tolist()]

        return wait

    def sums(self, values: Sequence[int]) -> list[int]:
        """Sums modulo 2**64 over the ranks, of values modulo 2**64."""
        return self.sums_later(values)()

    def any_and_unequal(self, flags: Sequence[bool], values: Sequence[int]) -> tuple[list[bool], list[bool]]:
        """For each flag: is it set on any rank? For each value of 63 bits, none negative: do the ranks' differ?"""
        # The largest of the negated values is the smallest: one exchange tells both ends.
        reduced = self._reduce(torch.tensor([*map(int, flags), *values, *(-value for value in values)]), "MAX")
        count, numbers = len(flags), len(values)
        largest, least = reduced[count : count + numbers], reduced[count + numbers :]
        unequal = [high != -low for high, low in zip(largest, least, strict=True)]
        return [bool(flag) for flag in reduced[:count]], unequal

    def by_rank(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, of 63 bits and as many on each rank."""
        table = torch.zeros((self.world_size, len(values)), dtype=torch.int64)
        table[self.rank] = torch.tensor(values, dtype=torch.int64)
        found = self._reduce(table.reshape(-1), "SUM")
        return [found[begin : begin + len(values)] for begin in range(0, len(found), len(values))]

    def gathered(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `rows`, of one shape and type on all ranks."""
        on_device = rows.to(self._device)
        found = [torch.empty_like(on_device) for _ in range(self.world_size)]
        dist.all_gather(found, on_device, group=self._group)
        return found

    def least(self, values: Sequence[int | bool]) -> list[int]:
        """The least of each value over the ranks."""
        return self._reduce(torch.tensor([int(value) for value in values], dtype=torch.int64), "MIN")

    def any(self, flag: bool) -> bool:
        """Is the flag set on any rank?"""
        return self._reduce(torch.tensor([int(flag)], dtype=torch.int64), "MAX") == [1]

    def all_told(self) -> None:
        """After a verdict on which every rank leaves the group: returns once all of them have it. The first to leave
        ends the group, and with it what others still wait for."""
        with suppress(RuntimeError):
            self.any(True)

    def _reduce(self, values: torch.Tensor, operation: str) -> list[int]:
        if values.numel() == 0:
            return []
        on_device = values.to(self._device)
        dist.all_reduce(on_device, op=getattr(dist.ReduceOp, operation), group=self._group)
        return [int(value) for value in on_device.cpu().tolist()]

    @staticmethod
    def _verdict(kind: type[ElasticError], rank: int, error: Exception | None, doing: str) -> ElasticError:
        if error is None:
            return kind(f"rank {rank} failed while {doing}; its own error says why", Where(rank=rank))
        return kind(f"rank {rank} failed while {doing}, and this rank too: {error}", Where(rank=rank))


def _raise(error: Exception) -> NoReturn:
    raise error


def _class_of(error: Exception) -> int:
    found = [number for number, kind in enumerate(_CLASSES) if isinstance(error, kind)]
    return found[0] if found else len(_CLASSES) - 1

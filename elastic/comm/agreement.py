"""Small collectives of a restore: all ranks go on together or raise together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.core.errors import (
    CollectiveFailed,
    ElasticError,
    IntegrityError,
    ModelMismatch,
    StorageError,
    UsageError,
    Where,
)

# Who must act decides: the user's mistake is told before broken data, and that before storage that may come back.
_CLASSES: tuple[type[ElasticError], ...] = (ModelMismatch, UsageError, IntegrityError, StorageError, CollectiveFailed)


class Agreement:
    """Verdicts shared over the ranks of one engine. Every method is collective."""

    def __init__(self, engine: Any, rank: int, world_size: int) -> None:
        self._group = engine.seq_data_parallel_group
        self._rank = rank
        self._world_size = world_size

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Returns when no rank had an error; else raises on all: the same class, naming the lowest failing rank."""
        flags = torch.zeros(len(_CLASSES), dtype=torch.int64)
        if error is not None:
            # The largest flag wins the reduction: that of the lowest rank.
            flags[_class_of(error)] = self._world_size - self._rank
        worst = self._reduce(flags, "MAX")
        for number, kind in enumerate(_CLASSES):
            if worst[number] > 0:
                rank = self._world_size - worst[number]
                if error is not None and rank == self._rank:
                    raise error
                raise self._verdict(kind, rank, error, doing) from error

    def sums(self, values: Sequence[int]) -> list[int]:
        """Sums modulo 2**64 over the ranks, of values modulo 2**64."""
        signed = [value - (1 << 64) if value >= 1 << 63 else value for value in (v % (1 << 64) for v in values)]
        return [value % (1 << 64) for value in self._reduce(torch.tensor(signed, dtype=torch.int64), "SUM")]

    def any_and_unequal(self, flags: Sequence[bool], values: Sequence[int]) -> tuple[list[bool], list[bool]]:
        """For each flag: is it set on any rank? For each value of 63 bits, none negative: do the ranks' differ?"""
        # The largest of the negated values is the smallest: one exchange tells both ends.
        reduced = self._reduce(torch.tensor([*map(int, flags), *values, *(-value for value in values)]), "MAX")
        count, numbers = len(flags), len(values)
        largest, least = reduced[count : count + numbers], reduced[count + numbers :]
        unequal = [high != -low for high, low in zip(largest, least, strict=True)]
        return [bool(flag) for flag in reduced[:count]], unequal

    def _reduce(self, values: torch.Tensor, operation: str) -> list[int]:
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator

        if values.numel() == 0:
            return []
        on_device = values.to(get_accelerator().current_device_name())
        comm.all_reduce(on_device, op=getattr(comm.ReduceOp, operation), group=self._group)
        return [int(value) for value in on_device.cpu().tolist()]

    @staticmethod
    def _verdict(kind: type[ElasticError], rank: int, error: Exception | None, doing: str) -> ElasticError:
        if error is None:
            return kind(f"rank {rank} failed while {doing}; its own error says why", Where(rank=rank))
        return kind(f"rank {rank} failed while {doing}, and this rank too: {error}", Where(rank=rank))


def _class_of(error: Exception) -> int:
    found = [number for number, kind in enumerate(_CLASSES) if isinstance(error, kind)]
    return found[0] if found else len(_CLASSES) - 1

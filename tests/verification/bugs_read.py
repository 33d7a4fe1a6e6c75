"""Bugs in what is read: a source that lies, fails, or is asked for something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.checkpoint.source import BytesRead
from verification.tools import Lying, Reading


def _after(change: Callable[[Any, Any], None]) -> Callable[[Reading], Any]:
    return lambda reading: Lying(reading.store, then=change)


def _tail(manifest: Any, wanted: Any) -> None:
    shard = manifest.shards[wanted.rank]
    ends = {chunk.offset + chunk.numel for chunk in shard.chunks if chunk.buffer == wanted.key.split("/", 1)[1]}
    if wanted.rank == manifest.world_size - 1 and wanted.offset + wanted.numel in ends:
        wanted.target[-1:] = 777


def _halved(manifest: Any, wanted: Any) -> None:
    if wanted.target.is_floating_point():
        wanted.target.copy_(wanted.target.bfloat16())


def _shorter(manifest: Any, wanted: Any) -> None:
    wanted.target[-1:] = 0


def _other_kind(wanted: Any) -> Any:
    kind, buffer = wanted.key.split("/", 1)
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(kind, kind)
    return replace(wanted, key=f"{other}/{buffer}")


def swapped(reading: Reading) -> Any:
    return Lying(reading.store, ask=_other_kind)


class OneStale:
    """The first range that it is asked for comes from the step before, where the same rank wrote the same layout."""

    name = "storage"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def manifest(self, checkpoint_id: str) -> Any:
        return self._reading.store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Any) -> Any:
        count = self._reading.store.read(manifest, ranges)
        older = self._reading.older.manifest(self._reading.older_id)
        if self._reading.rank == 0:
            wanted = next(wanted for wanted in ranges if wanted.rank == 0 and wanted.key == "exp_avg/group0")
            self._reading.older.read(older, [wanted])
        return count


class Fails:
    name = "storage"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def manifest(self, checkpoint_id: str) -> Any:
        return self._reading.store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Any) -> Any:
        if self._reading.rank == 1:
            raise KeyError("exp_avg")
        return self._reading.store.read(manifest, ranges)


class FileByRank:
    """Rank r reads file r, from whichever checkpoint has one."""

    name = "storage"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def manifest(self, checkpoint_id: str) -> Any:
        return self._reading.store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Any) -> Any:
        here = self._reading
        if here.rank < manifest.world_size:
            return here.store.read(manifest, ranges)
        older = here.older.manifest(here.older_id)
        own = {tensor.key: tensor.numel for tensor in older.shards[here.rank].tensors}
        for wanted in ranges:
            if wanted.key in own:
                count = min(wanted.numel, own[wanted.key])
                here.older.read(
                    older, [replace(wanted, rank=here.rank, offset=0, numel=count, target=wanted.target[:count])]
                )
        return BytesRead(storage=sum(wanted.target.nbytes for wanted in ranges))


tail_uninitialised = _after(_tail)
through_bf16 = _after(_halved)
truncated = _after(_shorter)

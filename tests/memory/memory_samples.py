"""Shards for the tests of snapshots in memory: bytes that depend on rank, step and place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.core.checkpoint.manifest import ShardRecord, StoredTensor
from elastic.core.checkpoint.snapshots import Held
from elastic.core.names import shard_file
from elastic.core.sharding.layout import Chunk

TOKEN = bytes(range(32))
KINDS = ("fp32", "exp_avg")


def template(rank: int = 0, world_size: int = 2, generation: int = 1, numel: int = 1000) -> ShardRecord:
    """Each rank holds `numel` elements of "w" in two kinds, with three elements of padding behind each."""
    length = numel + 3
    tensors = tuple(StoredTensor(f"{kind}/flat", "F32", length, at * length * 4) for at, kind in enumerate(KINDS))
    return ShardRecord(
        rank=rank,
        world_size=world_size,
        generation=generation,
        step=0,
        file=shard_file(rank, world_size),
        bytes=len(KINDS) * length * 4,
        xxh3="",
        tensors=tensors,
        chunks=(Chunk("w", rank * numel, numel, "flat", 0),),
        digests={},
        zero_stage=1,
        parameters={"w": (world_size * numel,)} if rank == 0 else None,
    )


def content(record: ShardRecord, step: int) -> np.ndarray:
    """What the shard holds at a step, as bytes."""
    seed = [record.generation, record.rank, step]
    return np.random.default_rng(seed).integers(0, 256, record.bytes, dtype=np.uint8)


def tensors(record: ShardRecord, step: int) -> dict[str, torch.Tensor]:
    raw = torch.from_numpy(content(record, step))
    return {t.key: raw[t.begin : t.begin + t.numel * 4].view(torch.float32) for t in record.tensors}


def snap(memory: SnapshotClient, record: ShardRecord, step: int) -> None:
    view = memory.segment()
    view[:] = memoryview(content(record, step))
    memory.commit(step, {"cursor": step} if record.rank == 0 else None)


def take(memory: SnapshotClient, record: ShardRecord, step: int) -> None:
    """A snapshot that counts."""
    snap(memory, record, step)
    assert memory.wait_complete(step, 30), memory.failed()
    memory.settled(step)


def held(record: ShardRecord, step: int, *, replica: bool = False) -> Held:
    return Held(record.generation, step, record.rank, record.world_size, replica)


def full_record(record: ShardRecord, step: int) -> ShardRecord:
    """What a server must say of the shard."""
    import xxhash

    from elastic.checkpoint.digest import partial_digests

    return replace(
        record,
        step=step,
        extra_state={"cursor": step} if record.rank == 0 else None,
        xxh3=xxhash.xxh3_64(content(record, step)).hexdigest(),
        digests=partial_digests(record.layout, tensors(record, step)),
    )


def server(limit_bytes: int | None = None) -> SnapshotServer:
    return SnapshotServer(TOKEN, "127.0.0.1", limit_bytes=limit_bytes)

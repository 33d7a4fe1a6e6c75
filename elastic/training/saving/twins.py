"""Ranks that have copies of the same shard (`fsdp2: {shard_workers: N}`) as each other's replicas in memory.

Where a run makes no replicas of snapshots, every node then keeps the whole of its ranks' shards, as those of one copy
of the model: a lost node's are on the nodes of other copies, and nothing is sent for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import xxhash

from elastic.comm.agreement import Agreement
from elastic.core.checkpoint.manifest import Json
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import BUFFER
from elastic.training.state.engine_state import EngineState
from elastic.training.state.verify_weights import MASK63, fingerprints


@dataclass(frozen=True)
class Twins:
    """This rank, and those of `copies`, have shard `shard` of `shards`: they are called as the ranks of a world that is
    one copy. Of those on one node the first `writes` it."""

    copies: Agreement
    shard: int
    shards: int
    writes: bool

    @classmethod
    def of(cls, state: EngineState, node: str, alone: bool, cell: int = 1) -> Twins | None:
        """Collective over all ranks; None, on all of them, where one is not `alone` (its snapshots have replicas, say),
        all copies of a shard are on one node, a copy is other than whole cells of `cell` ranks, or module buffers
        differ, of which only those of rank 0, or of a lane's first rank, are the run's."""
        every, copies, lanes = state.agreement, state.copies.own, state.lanes
        shards = every.world_size // copies.world_size
        alone = alone and shards % cell == 0
        buffers = [extra.tensor for extra in Inventory.of(state.sharded).extras if extra.kind == BUFFER]
        modules = json.dumps(state.modules(), sort_keys=True)
        own = xxhash.xxh3_64_intdigest(repr([fingerprints(buffers), modules]).encode()) & MASK63
        nodes = [number for (number,) in copies.by_rank([crc32(node.encode())])]
        *found, every_alone, apart = every.least([*lanes.low_and_high(0, own), alone, len(set(nodes)) > 1])
        if found[::2] != [-high for high in found[1::2]] or not every_alone or not apart:
            return None
        return cls(copies, every.rank % shards, shards, nodes.index(nodes[copies.rank]) == copies.rank)

    def reports(self, own: list[dict[str, Any]]) -> Mapping[str, Json]:
        """The step reports of each of these ranks, as JSON by rank: if one is lost, only the others tell of them.
        Collective over them."""
        text = json.dumps(own).encode()
        sizes = [size for (size,) in self.copies.by_rank([len(text)])]
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = zip(self.copies.ranks, sizes, self.copies.gathered(row), strict=True)
        return {str(rank): json.loads(bytes(found[:size].cpu().tolist())) for rank, size, found in rows}

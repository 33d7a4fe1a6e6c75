"""What honest ranks report of their shards, for tests of manifests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.lanes import CUTS
from elastic.core.checkpoint.manifest import Manifest, ShardRecord, StoredTensor
from elastic.core.names import shard_file
from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.layout import Layout
from elastic.core.sharding.zero import zero12_layout

GROUPS = [[("a", 7), ("b", 12)], [("c", 1)]]
SHAPES = {"a": (7,), "b": (3, 4), "c": (), "empty": (0, 4)}
KINDS = ("fp32", "exp_avg")


def records(
    layout: Layout, shapes: dict[str, tuple[int, ...]], step: int = 40, generation: int = 3
) -> list[ShardRecord]:
    """What honest ranks would report; the digest of each element is 2**63 + its index, so that sums overflow."""
    found = []
    for number, rank in enumerate(layout.ranks):
        tensors, begin = [], 128
        for kind in KINDS:
            for buffer, length in rank.buffers.items():
                tensors.append(StoredTensor(f"{kind}/{buffer}", "F32", length, begin))
                begin += 4 * length
        digests: dict[str, int] = {}
        for chunk in rank.chunks:
            for kind in KINDS:
                own = sum(2**63 + index for index in range(chunk.start, chunk.stop)) % 2**64
                digests[f"{kind}/{chunk.name}"] = (digests.get(f"{kind}/{chunk.name}", 0) + own) % 2**64
        found.append(
            ShardRecord(
                rank=number,
                world_size=layout.world_size,
                generation=generation,
                step=step,
                file=shard_file(number, layout.world_size),
                bytes=begin,
                xxh3=f"{number:016x}",
                tensors=tuple(tensors),
                chunks=rank.chunks,
                digests=digests,
                extra_state={"cursor": step} if number == 0 else None,
                zero_stage=2,
                parameters=shapes if number == 0 else None,
            )
        )
    return found


def example(world: int = 4) -> list[ShardRecord]:
    return records(zero12_layout(GROUPS, world), SHAPES)


def manifest() -> Manifest:
    return assemble(example(), run_id="run-1", versions={"torch": "2"}, written_at=1.5)


# The second lane's slice of "b" is smaller: 10 rows over 3 ranks, say.
SECOND = {**SHAPES, "b": (2, 4)}
SECOND_GROUPS = [[("a", 7), ("b", 8)], [("c", 1)]]


def shards_of_two_lanes(cells: int = 3) -> list[ShardRecord]:
    """What `cells` cells of two ranks report, in the order of their ranks."""
    lanes = [
        records(zero12_layout(GROUPS, cells), SHAPES),
        records(zero12_layout(SECOND_GROUPS, cells), SECOND),
    ]
    found = []
    for cell in range(cells):
        for lane, own in enumerate(lanes):
            rank = 2 * cell + lane
            extra = own[cell].extra_state if rank == 0 else None
            file = shard_file(rank, 2 * cells)
            found.append(replace(own[cell], rank=rank, world_size=2 * cells, file=file, extra_state=extra, tp=2))
    return found


def of_two_lanes() -> Manifest:
    return assemble(shards_of_two_lanes(), run_id="run-1")


# Of "b".
ROWS = Cut(0, (5, 4), (((0, 2), (4, 5)), ((2, 4),)))


def recorded(cuts: Any) -> Manifest:
    whole = of_two_lanes()
    return replace(whole, extra_state={**whole.extra_state, CUTS: cuts})

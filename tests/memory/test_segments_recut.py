"""A snapshot in the memory of nodes, of ranks that shared layers otherwise than those that read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import memory_samples as samples
import pytest
from memory_samples import TOKEN
from test_lane_reader import write
from test_recut_reading import ALONE, HERE, read_by_all, require_own

from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.checkpoint.memory.source import Holder, MemorySource
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.lanes import lane_of
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import IntegrityError
from elastic.core.sharding.cuts import Cut
from elastic.training.state.recut.verdict import require_whole


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Nodes:
    """One rank of the checkpoint in `folder` on each, with its shard in memory."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        store = CheckpointStore(str(folder), "run")
        stored = store.manifest(store.list()[0].id)
        self.servers, self.segments, records = [], [], []
        for shard in stored.shards:
            node = stack.enter_context(closing(samples.server()))
            memory = stack.enter_context(closing(SnapshotClient(node.local_name, TOKEN)))
            named = lane_of(stored, shard.rank).parameters if shard.rank < stored.tp else None
            memory.open(replace(shard, step=0, digests={}, xxh3="", parameters=named), shard.bytes, [])
            segment = memory.segment()
            stack.callback(segment.release)
            segment[:] = next(folder.rglob(shard.file)).read_bytes()
            memory.commit(stored.step, stored.extra_state if shard.rank == 0 else None)
            assert memory.wait_complete(stored.step, 30), memory.failed()
            memory.settled(stored.step)
            records.append(node.record(samples.held(shard, stored.step)))
            self.servers.append(node)
            self.segments.append(segment)
        self.manifest = assemble(records, run_id="run")

    def source(self, own: int | None) -> MemorySource:
        """For a reader on node `own`; None: it has no shard of the snapshot."""
        holders = {
            rank: Holder(node.address, node.local_name if rank == own else None)
            for rank, node in enumerate(self.servers)
        }
        return MemorySource(self._manifest, holders, TOKEN, timeout_s=30)

    def _manifest(self, _: str) -> Manifest:
        return self.manifest


@pytest.mark.parametrize(
    ("cuts", "stage", "batch_bytes"), [(HERE, 1, 1 << 20), (HERE, 3, 50), ({}, 1, 1 << 20)], ids=["1", "3", "whole"]
)
def test_ranks_read_their_slices_of_the_memory_of_nodes(
    stack: ExitStack, tmp_path: Path, cuts: dict[str, Cut], stage: int, batch_bytes: int
) -> None:
    write(tmp_path, 4 - stage)
    nodes = Nodes(stack, tmp_path)
    assert nodes.manifest.tp == 2
    for own in (None, 1):
        recut, seen, found = read_by_all(nodes.source(own), nodes.manifest, cuts, stage, batch_bytes)
        require_own(cuts, found)
        require_whole(recut, seen, (), ALONE)
    assert sum(staged.bytes_from.own_node for _, _, staged, _ in found) > 0


def test_memory_that_is_not_what_was_committed_is_named(stack: ExitStack, tmp_path: Path) -> None:
    """The copy in memory has changed after its digest was made: bytes of a slice that is cut anew."""
    write(tmp_path)
    nodes = Nodes(stack, tmp_path)
    shard, chunk = next((s, c) for s in nodes.manifest.shards for c in s.chunks if c.name == "columns")
    begin = next(tensor.begin for tensor in shard.tensors if tensor.key == f"exp_avg/{chunk.buffer}")
    nodes.segments[shard.rank][begin + 4 * chunk.offset] ^= 1
    recut, seen, _ = read_by_all(nodes.source(None), nodes.manifest, HERE, 1, 1 << 20)
    with pytest.raises(IntegrityError, match=r"exp_avg of 'columns' .* is not what was written"):
        require_whole(recut, seen, (), ALONE)

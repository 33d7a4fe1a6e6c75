"""The whole chain but for DeepSpeed: state at one world size, through storage, to state at another."""

from __future__ import annotations

import uuid

import pytest
import torch
from checkpoint_samples import SHAPES, snapshots, state, wanted, written

from elastic.checkpoint.digest import partial_digests
from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.sharding.layout import RankLayout
from elastic.core.sharding.reshard import plan_rank

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
STAGES = ["zero12", "zero3", "zero0"]
WORLDS = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 6), (6, 4), (7, 5), (12, 5), (1, 40)]


def save(store: CheckpointStore, stage: str, world: int, full: dict[str, dict[str, torch.Tensor]]) -> Manifest:
    shards = [store.write_shard(snapshot) for snapshot in snapshots(written(stage, world), full)]
    manifest = assemble(shards, run_id="run")
    store.commit(manifest)
    return store.manifest(manifest.id)


def restore(
    source: CheckpointSource, manifest: Manifest, target: RankLayout, rank: int
) -> tuple[dict[str, torch.Tensor], int]:
    """One rank's tensors by "<kind>/<buffer>", and the bytes that were fetched for them."""
    stored = [{tensor.key: tensor for tensor in shard.tensors} for shard in manifest.shards]
    kinds = {key.split("/", 1)[0] for key in manifest.digests}
    tensors: dict[str, torch.Tensor] = {}
    ranges = []
    for copy in plan_rank([shard.layout for shard in manifest.shards], target, spread=rank):
        for kind in kinds:
            found = stored[copy.source_rank].get(f"{kind}/{copy.source_buffer}")
            if found is None:
                continue
            empty = torch.zeros(target.buffers[copy.target_buffer], dtype=TORCH_DTYPES[found.dtype])
            tensor = tensors.setdefault(f"{kind}/{copy.target_buffer}", empty)
            part = tensor[copy.target_offset : copy.target_offset + copy.numel]
            ranges.append(ReadRange(copy.source_rank, found.key, copy.source_offset, copy.numel, part))
    return tensors, source.read(manifest, ranges).total


@pytest.mark.parametrize(("before", "after"), WORLDS)
@pytest.mark.parametrize("target_stage", STAGES)
@pytest.mark.parametrize("source_stage", STAGES)
def test_state_survives_another_world_size(source_stage: str, target_stage: str, before: int, after: int) -> None:
    full = state(seed=before)
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}", "run", max_gap_bytes=0)
    manifest = save(store, source_stage, before, full)
    assert manifest.parameters == SHAPES
    for rank, target in enumerate(wanted(target_stage, after).ranks):
        tensors, fetched = restore(store, manifest, target, rank)
        needed = 0
        for chunk in target.chunks:
            for kind, whole in full.items():
                if chunk.name in whole:
                    here = tensors[f"{kind}/{chunk.buffer}"][chunk.offset : chunk.offset + chunk.numel]
                    there = whole[chunk.name][chunk.start : chunk.stop]
                    assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
                    needed += there.numel() * there.element_size()
        assert fetched == needed, "bytes read differ from bytes needed"


@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_content_checks_verify_what_was_restored(before: int, after: int) -> None:
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}", "run")
    manifest = save(store, "zero12", before, state())
    # Dealt, not replicated, so that every element is on one rank and the sum over the ranks is the whole.
    total = dict.fromkeys(manifest.digests, 0)
    for rank, target in enumerate(written("zero3", after).ranks):
        for key, partial in partial_digests(target, restore(store, manifest, target, rank)[0]).items():
            total[key] = (total[key] + partial) % 2**64
    assert total == manifest.digests


def test_there_and_back_writes_the_same_checkpoint() -> None:
    first, second = (CheckpointStore(f"memory://{uuid.uuid4().hex}", "run") for _ in range(2))
    here = save(first, "zero12", 4, state())
    moved: dict[str, dict[str, torch.Tensor]] = {}
    whole = wanted("zero0", 1).ranks[0]
    for key, tensor in restore(first, here, whole, 0)[0].items():
        kind, name = key.split("/", 1)
        moved.setdefault(kind, {})[name] = tensor
    there = save(second, "zero12", 4, moved)
    assert there.digests == here.digests
    assert there.parameters == here.parameters
    assert [shard.chunks for shard in there.shards] == [shard.chunks for shard in here.shards]


@pytest.mark.parametrize("kind", ["fp32", "exp_avg", "exp_avg_sq", "param", "buffer"])
def test_one_wrong_element_in_storage_is_found_by_the_content_checks(kind: str) -> None:
    full = state()
    good = save(CheckpointStore(f"memory://{uuid.uuid4().hex}", "run"), "zero3", 3, full)
    name = next(iter(full[kind]))
    full[kind][name] = ~full[kind][name] if kind == "buffer" else full[kind][name] * 1.01
    bad = save(CheckpointStore(f"memory://{uuid.uuid4().hex}", "run"), "zero3", 3, full)
    assert {key for key in good.digests if good.digests[key] != bad.digests[key]} == {f"{kind}/{name}"}

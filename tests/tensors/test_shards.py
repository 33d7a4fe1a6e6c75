from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from checkpoint_samples import one_snapshot, snapshots, state, written

from elastic.checkpoint.digest import partial_digests
from elastic.checkpoint.shards import DTYPE_NAMES, ShardStream, bytes_of, plan_file
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.core.checkpoint.manifest_json import ITEM_BYTES
from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, RankLayout

ALL_DTYPES = sorted(DTYPE_NAMES, key=str)


def bare(tensors: dict[str, torch.Tensor], layout: RankLayout | None = None) -> ShardSnapshot:
    buffers = {key.rpartition("/")[2]: tensor.numel() for key, tensor in tensors.items()}
    return one_snapshot(tensors=tensors, layout=layout or RankLayout((), buffers))


def write(snapshot: ShardSnapshot, path: Path) -> ShardStream:
    stream = ShardStream(snapshot)
    path.write_bytes(b"".join(stream))
    return stream


@pytest.mark.parametrize("stage", ["zero12", "zero3", "zero0"])
@pytest.mark.parametrize("world", [1, 3, 40])
def test_the_library_reads_what_was_written(stage: str, world: int, tmp_path: Path) -> None:
    for snapshot in snapshots(written(stage, world), state()):
        path = tmp_path / "shard.safetensors"
        record = write(snapshot, path).record()
        loaded = safetensors.torch.load_file(path)
        assert loaded.keys() == snapshot.tensors.keys()
        for key, tensor in snapshot.tensors.items():
            assert torch.equal(bytes_tensor(loaded[key]), bytes_tensor(tensor))
            assert loaded[key].dtype == tensor.dtype
        data = path.read_bytes()
        assert record.bytes == len(data)
        assert record.xxh3 == xxhash.xxh3_64(data).hexdigest()
        for stored in record.tensors:
            length = stored.numel * ITEM_BYTES[stored.dtype]
            assert data[stored.begin : stored.begin + length] == bytes(bytes_of(snapshot.tensors[stored.key]))
            assert stored.begin % ITEM_BYTES[stored.dtype] == 0
        assert record.digests == partial_digests(snapshot.layout, snapshot.tensors)
        assert (record.rank, record.world_size, record.step, record.generation) == (snapshot.rank, world, 40, 3)
        assert record.parameters == snapshot.parameters


def bytes_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {}
    for number, dtype in enumerate(ALL_DTYPES):
        raw = torch.arange(7 * dtype.itemsize, dtype=torch.uint8) % 2
        tensors[f"k{number}/odd{number}"] = raw.view(dtype)
    path = tmp_path / "shard.safetensors"
    record = write(bare(tensors), path).record()
    loaded = safetensors.torch.load_file(path)
    assert {key: tensor.dtype for key, tensor in loaded.items()} == {key: t.dtype for key, t in tensors.items()}
    assert all(torch.equal(bytes_tensor(loaded[key]), bytes_tensor(tensor)) for key, tensor in tensors.items())
    assert {t.dtype for t in record.tensors} == set(DTYPE_NAMES.values()) <= set(ITEM_BYTES)


def test_the_header_says_where_the_file_belongs(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    write(one_snapshot(), path)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"run": "run", "generation": "3", "step": "40", "rank": "0", "world_size": "1"}


def test_empty_snapshots_and_empty_buffers(tmp_path: Path) -> None:
    for tensors in ({}, {"fp32/none": torch.empty(0)}):
        path = tmp_path / "shard.safetensors"
        record = write(bare(tensors), path).record()
        assert safetensors.torch.load_file(path).keys() == tensors.keys()
        assert record.bytes == path.stat().st_size


def test_the_same_bytes_again_after_a_failed_write() -> None:
    stream = ShardStream(one_snapshot())
    first = b"".join(stream)
    next(iter(stream))  # a write that stopped early
    assert b"".join(stream) == first
    assert stream.record().xxh3 == xxhash.xxh3_64(first).hexdigest()


def test_the_state_is_not_copied() -> None:
    tensor = torch.zeros(10)
    chunks = list(ShardStream(bare({"fp32/x": tensor})))
    tensor[3] = 1.0
    assert bytes(chunks[1]) == bytes(bytes_of(tensor))


BAD = {
    "no kind": ({"x": torch.zeros(4)}, "not <kind>/<buffer>"),
    "unknown buffer": ({"fp32/x": torch.zeros(4), "fp32/y": torch.zeros(4)}, "not <kind>/<buffer>"),
    "2-D": ({"fp32/x": torch.zeros(2, 2)}, "not 1-D contiguous"),
    "with gaps": ({"fp32/x": torch.zeros(8)[::2]}, "not 1-D contiguous"),
    "on no device": ({"fp32/x": torch.zeros(4, device="meta")}, "not 1-D contiguous CPU"),
    "too short": ({"fp32/x": torch.zeros(3)}, "has 3 elements, its layout says 4"),
    "no tensor": ({}, "no tensor for it"),
    "dtype": ({"fp32/x": torch.zeros(4, dtype=torch.complex128)}, "cannot be stored"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_snapshots_are_named(case: str) -> None:
    tensors, message = BAD[case]
    with pytest.raises(IntegrityError, match=message):
        plan_file(bare(tensors, RankLayout((), {"x": 4})))


def test_a_layout_that_overlaps_itself_is_refused() -> None:
    chunks = (Chunk("a", 0, 3, "x", 0), Chunk("b", 0, 3, "x", 1))
    with pytest.raises(IntegrityError, match="overlaps"):
        plan_file(bare({"fp32/x": torch.zeros(4)}, RankLayout(chunks, {"x": 4})))

"""Tensors of checkpoints whose ranks had slices of the layers, whole: read, exported, begun from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import elastic
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.lanes import CUTS
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.settings import WeightsSettings
from elastic.core.sharding.cuts import Cut, to_json
from elastic.core.sharding.layout import Chunk, RankLayout, merged
from elastic.core.sharding.zero import zero3_layout, zero12_layout
from elastic.interchange.tensors import CheckpointTensors
from elastic.interchange.weights import CheckpointWeights, open_weights

CELLS, TP = 2, 2
SHAPES: dict[str, tuple[int, ...]] = {"rows": (9, 4), "columns": (5, 7), "fused": (3, 10, 2), "one": (4,), "norm": (5,)}
CUTS_OF: dict[str, Cut] = {
    # Unequal shares; of the inputs; of two sub-parameters, in the middle; nothing at all of one rank's.
    "rows": Cut(0, (9, 4), (((0, 5),), ((5, 9),))),
    "columns": Cut(1, (5, 7), (((0, 4),), ((4, 7),))),
    "fused": Cut(1, (3, 10, 2), (((0, 3), (6, 8)), ((3, 6), (8, 10)))),
    "one": Cut(0, (4,), (((0, 4),), ())),
}
RECORD = to_json(CUTS_OF)
KINDS = {"master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
COUNTS = torch.arange(3)


def whole(name: str, kind: str = "master") -> torch.Tensor:
    generator = torch.Generator().manual_seed(list(SHAPES).index(name) * 10 + list(KINDS).index(kind))
    return torch.randn(SHAPES[name], generator=generator).to(KINDS[kind])


def part(value: torch.Tensor, name: str, lane: int) -> torch.Tensor:
    """By this test's own rule."""
    if name not in CUTS_OF:
        return value
    cut = CUTS_OF[name]
    indices = [index for start, stop in cut.ranges[lane] for index in range(start, stop)]
    return value.index_select(cut.dim, torch.tensor(indices, dtype=torch.long))


def snapshots(stage: int, record: Any) -> Sequence[ShardSnapshot]:
    """What each rank of `CELLS` cells writes; the first of a lane has a buffer of the model besides."""
    found = {}
    for lane in range(TP):
        own = {name: part(whole(name), name, lane) for name in SHAPES}
        group = [[(name, value.numel()) for name, value in own.items() if value.numel()]]
        layout = zero3_layout(group, CELLS) if stage == 3 else zero12_layout(group, CELLS)
        shapes = {name: tuple(value.shape) for name, value in own.items()} | {"counts": (3,)}
        for cell in range(CELLS):
            held = layout.ranks[cell]
            tensors = {
                f"{kind}/{b}": torch.zeros(n, dtype=t) for kind, t in KINDS.items() for b, n in held.buffers.items()
            }
            for kind in KINDS:
                for chunk in held.chunks:
                    flat = part(whole(chunk.name, kind), chunk.name, lane).reshape(-1)
                    there = tensors[f"{kind}/{chunk.buffer}"]
                    there[chunk.offset : chunk.offset + chunk.numel] = flat[chunk.start : chunk.stop]
            if cell == 0:
                held = merged(held, RankLayout((Chunk("counts", 0, 3, "counts", 0),), {"counts": 3}))
                tensors["buffer/counts"] = COUNTS.clone()
            rank = cell * TP + lane
            found[rank] = ShardSnapshot(
                run_id="run", generation=1, rank=rank, world_size=CELLS * TP, step=40, zero_stage=stage, layout=held,
                tensors=tensors, parameters=shapes if cell == 0 else None, tp=TP,
                extra_state=extra(record) if rank == 0 else None,
            )  # fmt: skip
    return [found[rank] for rank in sorted(found)]


def extra(record: Any) -> dict[str, Any]:
    optimizer = {"groups": [{"names": list(SHAPES), "hyper": {"lr": 0.1}}], "scalars": []}
    engine = dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0)
    said = {"model": {"aliases": {"head": "rows"}}, "optimizer": optimizer, "engine": engine, "scheduler": None}
    return said if record is None else {**said, CUTS: record}


def write(storage: Path, stage: int = 1, record: Any = RECORD) -> Path:
    store = CheckpointStore(str(storage), "run")
    manifest = assemble([store.write_shard(snapshot) for snapshot in snapshots(stage, record)], run_id="run")
    store.commit(manifest)
    return storage / "run" / "checkpoints" / manifest.id


def opened(folder: Path) -> CheckpointTensors:
    weights = open_weights(WeightsSettings(str(folder)))
    assert isinstance(weights, CheckpointWeights)
    return weights._source


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_and_optimizer_state_are_whole(tmp_path: Path, stage: int) -> None:
    source = opened(write(tmp_path, stage))
    assert {name: info.shape for name, info in source.tensors.items()} == {**SHAPES, "counts": (3,)}
    for name in SHAPES:
        assert source.state_kinds(name) == ["exp_avg", "exp_avg_sq"]
        for kind in KINDS:
            found = source.read(name, kind)
            assert found.dtype == KINDS[kind]
            assert torch.equal(found, whole(name, kind)), (name, kind)
    assert torch.equal(source.read("counts"), COUNTS), "what each rank has whole, once"


@pytest.mark.parametrize("name", list(SHAPES))
def test_any_interval_is_read_and_each_stored_element_is_seen_once(tmp_path: Path, name: str) -> None:
    source, flat = opened(write(tmp_path)), whole(name).flatten()
    for start in range(0, flat.numel(), 3):
        for stop in range(start, flat.numel() + 1, 4):
            target = torch.full((stop - start,), float("nan"))
            source.read_into(name, start, target)
            assert torch.equal(target, flat[start:stop]), (start, stop)
    cut = CUTS_OF.get(name)
    lanes = [part(whole(name), name, lane).flatten() for lane in range(TP if cut else 1)]
    times: list[Any] = []

    def seen(lane: int, first: int, elements: torch.Tensor) -> None:
        times[lane][first : first + elements.numel()] += 1
        assert torch.equal(elements, lanes[lane][first : first + elements.numel()])

    # All of it, and in two halves, as two ranks read it.
    for end in (flat.numel(), flat.numel() // 2):
        times[:] = [np.zeros(own.numel()) for own in lanes]
        for start, stop in ((0, end), (end, flat.numel())):
            source.read_into(name, start, torch.empty(stop - start), seen=seen)
        assert all((own == 1).all() for own in times)


def test_safetensors_and_torch_hold_whole_tensors(tmp_path: Path) -> None:
    folder = elastic.export(write(tmp_path), tmp_path / "out")
    found = safetensors.torch.load_file(folder / "model.safetensors")
    assert sorted(found) == sorted([*SHAPES, "counts"])
    assert all(torch.equal(found[name], whole(name)) for name in SHAPES)
    made = torch.load(elastic.export(write(tmp_path / "b", 3), tmp_path / "torch", to="torch") / "model.pt")
    assert all(torch.equal(made[name], whole(name)) for name in SHAPES)
    assert torch.equal(made["head"], whole("rows"))


# torch says that one process loads alone, which is what is meant here.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_them(tmp_path: Path) -> None:
    folder = elastic.export(write(tmp_path), tmp_path / "out", to="dcp")
    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[name], whole(name)) for name in SHAPES)


def test_a_universal_checkpoint_has_optimizer_state_of_whole_tensors(tmp_path: Path) -> None:
    folder = elastic.export(write(tmp_path), tmp_path / "out", to="deepspeed-universal")
    tag = (folder / "latest_universal").read_text()
    for name in SHAPES:
        for kind, file in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            found = torch.load(folder / tag / "zero" / name / f"{file}.pt")["param"]
            assert torch.equal(found, whole(name, kind).float()), (name, kind)


def test_a_damaged_slice_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    shard = folder / "rank-00003-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    for at in range(len(raw) // 2, len(raw)):
        raw[at] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(IntegrityError, match="is not what was written"):
        elastic.export(folder, tmp_path / "out", to="deepspeed-universal")


def test_a_record_that_slices_do_not_fit_is_refused(tmp_path: Path) -> None:
    turned = {**CUTS_OF, "rows": Cut(0, (9, 4), (((5, 9),), ((0, 5),)))}
    with pytest.raises(IntegrityError, match="slices of 'rows' in shapes"):
        elastic.export(write(tmp_path, record=to_json(turned)), tmp_path / "out")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, r"saved with mesh: {tp: 2} and does not say which parts of the whole tensors its slices are"),
        (to_json({**CUTS_OF, "fused": "it is scaled"}), "slices of 'fused' cannot be put together: it is scaled"),
    ],
)
def test_slices_that_nobody_can_put_together_are_refused(tmp_path: Path, record: Any, said: str) -> None:
    folder = write(tmp_path / "runs", record=record)
    with pytest.raises(UsageError, match=said):
        elastic.export(folder, tmp_path / "out")
    with pytest.raises(UsageError, match=said):
        open_weights(WeightsSettings(str(folder)))
    assert not (tmp_path / "out").exists()


def test_a_run_that_begins_with_them_can_judge_what_its_ranks_have_read(tmp_path: Path) -> None:
    weights = open_weights(WeightsSettings(str(write(tmp_path))))
    assert isinstance(weights, CheckpointWeights)
    assert sorted(weights.shapes) == sorted([*SHAPES, "counts", "head"])
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        half = numel // 2
        parts = [weights.read(name, 0, half), weights.read(name, half, numel - half)]
        assert torch.equal(torch.cat(parts).view(shape), whole(name))
    weights.read("counts", 0, 3)
    # Of what is whole in all lanes that of the first, of what is cut all, and nothing of a slice of nothing.
    cut = {f"master/{name}@tp{lane}" for name in CUTS_OF for lane in range(TP)} - {"master/one@tp1"}
    assert set(weights.stored) == cut | {"master/norm@tp0", "buffer/counts@tp0"}
    for key, (numel, digest) in weights.stored.items():
        assert weights.read_so_far(key) == (digest, numel), key


def test_the_record_is_json(tmp_path: Path) -> None:
    folder = write(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert manifest["client"][CUTS]["kinds"][0] == [0, [9, 4], [[[0, 5]], [[5, 9]]]]
    assert manifest["client"][CUTS]["names"]["rows"] == 0

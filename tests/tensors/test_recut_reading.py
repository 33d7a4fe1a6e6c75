"""What a rank reads of slices that are cut otherwise, and what all ranks judge of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from test_lane_reader import COUNTS, KINDS, SHAPES, whole, write

from elastic.checkpoint.digest import digest
from elastic.checkpoint.source import CheckpointSource
from elastic.checkpoint.storage import CheckpointStore
from elastic.comm.agreement import Agreement
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.checkpoint.recut import Recut
from elastic.core.errors import IntegrityError, ModelMismatch
from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.layout import Chunk
from elastic.core.sharding.zero import zero3_layout, zero12_layout
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import BUFFER, Extra, Master
from elastic.engines.optimizer.state import MasterState
from elastic.training.state.reading import Staged
from elastic.training.state.recut.reading import Made, Seen, read_recut
from elastic.training.state.recut.verdict import expected_digests, require_whole

CELLS = 2
# Other shares, along another dimension, one that was whole before, and whole what was cut.
HERE: dict[str, Cut] = {
    "rows": Cut(0, (9, 4), (((0, 2),), ((2, 8),), ((8, 9),))),
    "columns": Cut(0, (5, 7), (((4, 5),), ((0, 3),), ((3, 4),))),
    "fused": Cut(1, (3, 10, 2), (((0, 1), (6, 7)), ((1, 6),), ((7, 10),))),
    "norm": Cut(0, (5,), (((0, 1),), ((1, 4),), ((4, 5),))),
}


class Alone:
    """One rank that has read what all have."""

    def sums(self, values: Sequence[int]) -> list[int]:
        return [value % 2**64 for value in values]

    def any_and_unequal(self, flags: Sequence[bool], values: Sequence[int]) -> tuple[list[bool], list[bool]]:
        return list(flags), [False] * len(values)


ALONE = cast(Agreement, Alone())


def mine(name: str, kind: str, cuts: dict[str, Cut], lane: int) -> torch.Tensor:
    if name not in cuts:
        return whole(name, kind).reshape(-1)
    indices = [index for start, stop in cuts[name].ranges[lane] for index in range(start, stop)]
    return whole(name, kind).index_select(cuts[name].dim, torch.tensor(indices, dtype=torch.long)).reshape(-1)


def live(cuts: dict[str, Cut], lane: int, cell: int, stage: int) -> Inventory:
    group = [[(name, mine(name, "master", cuts, lane).numel()) for name in SHAPES]]
    group = [[(name, numel) for name, numel in group[0] if numel]]
    held = (zero3_layout if stage == 3 else zero12_layout)(group, CELLS).ranks[cell]
    masters = [
        Master(buffer, 0, torch.zeros(numel), tuple(c for c in held.chunks if c.buffer == buffer), tuple(SHAPES), False)
        for buffer, numel in held.buffers.items()
    ]
    counts = Extra(BUFFER, torch.zeros(3, dtype=torch.int64), Chunk("counts", 0, 3, "counts", 0), replicated=True)
    return Inventory(tuple(masters), tuple(MasterState({}, {}) for _ in masters), (counts,))


def read_all(
    folder: Path, cuts: dict[str, Cut], stage: int, batch_bytes: int
) -> tuple[Recut, Seen, list[tuple[int, Inventory, Staged, Made]]]:
    store = CheckpointStore(str(folder), "run")
    return read_by_all(store, store.manifest(store.list()[0].id), cuts, stage, batch_bytes)


def read_by_all(
    source: CheckpointSource, manifest: Manifest, cuts: dict[str, Cut], stage: int, batch_bytes: int
) -> tuple[Recut, Seen, list[tuple[int, Inventory, Staged, Made]]]:
    """By all ranks; what they have read together."""
    tp, together, found = 3 if cuts else 1, Seen(), []
    for lane in range(tp):
        recut = Recut.of(manifest, cuts, lane, tp)
        for cell in range(CELLS):
            inventory = live(cuts, lane, cell, stage)
            staged, seen, made = read_recut(source, recut, recut.manifest, inventory, cell, batch_bytes)
            assert staged.bytes_from.total == staged.bytes_needed, "nothing beside what is needed"
            for key, (total, count) in seen.items():
                before = together.get(key, (0, 0))
                together[key] = ((before[0] + total) % 2**64, before[1] + count)
            found.append((lane, inventory, staged, made))
    return recut, together, found


@pytest.mark.parametrize("batch_bytes", [1, 50, 1 << 20])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("cuts", [HERE, {}], ids=["slices", "whole"])
def test_every_rank_has_its_elements_of_every_kind(
    tmp_path: Path, cuts: dict[str, Cut], stage: int, batch_bytes: int
) -> None:
    write(tmp_path, 4 - stage)
    recut, seen, found = read_all(tmp_path, cuts, stage, batch_bytes)
    require_own(cuts, found)
    require_whole(recut, seen, (), ALONE)


def require_own(cuts: dict[str, Cut], found: list[tuple[int, Inventory, Staged, Made]]) -> None:
    for lane, inventory, staged, _ in found:
        for kind, dtype in KINDS.items():
            for chunk in (chunk for master in inventory.masters for chunk in master.chunks):
                values = staged.tensors[chunk.buffer][kind]
                assert values.dtype == dtype
                part = mine(chunk.name, kind, cuts, lane)[chunk.start : chunk.stop]
                assert torch.equal(values[chunk.offset : chunk.offset + chunk.numel], part), (kind, chunk)
        assert torch.equal(staged.extra(inventory.extras[0]), COUNTS)


def test_what_was_read_is_expected_in_the_numbers_of_these_slices(tmp_path: Path) -> None:
    write(tmp_path)
    recut, _, found = read_all(tmp_path, HERE, 1, 1 << 20)
    totals: dict[str, int] = {}
    for lane, _, staged, made in found:
        if lane == 2:
            own = expected_digests(recut, staged.manifest, made, 1, ALONE)
            for key in own:
                totals[key] = (totals.get(key, 0) + own[key]) % 2**64
            assert own["buffer/counts"] == recut.manifest.digests["buffer/counts"]
    for name in SHAPES:
        for kind in KINDS:
            assert totals[f"{kind}/{name}"] == digest(mine(name, kind, HERE, 2), f"{kind}/{name}"), (kind, name)


def test_damage_and_elements_that_nobody_has_read_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    recut, seen, _ = read_all(tmp_path, HERE, 1, 1 << 20)
    for key in [("exp_avg/columns", 1), ("master/norm", 0)]:
        total, count = seen[key]
        for wrong in ((total ^ 1, count), (total, count - 1), (0, 0), (2 * total % 2**64, count)):
            with pytest.raises(IntegrityError, match=f"{key[0].replace('/', ' of .')}.* is not what was written"):
                require_whole(recut, {**seen, key: wrong}, (), ALONE)
        require_whole(recut, {**seen, key: (2 * total % 2**64, 2 * count)}, (), ALONE)
    require_whole(recut, {key: value for key, value in seen.items() if key[0] != "buffer/counts"}, ("counts",), ALONE)
    shard = folder / "rank-00003-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    for at in range(len(raw) // 2, len(raw)):
        raw[at] ^= 1
    shard.write_bytes(raw)
    recut, seen, _ = read_all(tmp_path, HERE, 1, 1 << 20)
    with pytest.raises(IntegrityError, match="is not what was written"):
        require_whole(recut, seen, (), ALONE)


def test_a_flat_tensor_of_two_dtypes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    store = CheckpointStore(str(tmp_path), "run")
    manifest = store.manifest(store.list()[0].id)
    from elastic.training.state.recut import reading

    given = reading._stored_dtypes(manifest)
    monkeypatch.setattr(reading, "_stored_dtypes", lambda _: {**given, "norm": {**given["norm"], "master": "BF16"}})
    recut = Recut.of(manifest, {}, 0, 1)
    with pytest.raises(ModelMismatch, match="'master' of 'norm' as BF16 and of a parameter that shares its flat"):
        read_recut(store, recut, recut.manifest, live({}, 0, 0, 1), 0)

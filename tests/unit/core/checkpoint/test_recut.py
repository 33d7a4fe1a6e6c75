"""Checkpoints as those of slices that are cut otherwise: what a lane has then, what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from shard_records import ROWS, SHAPES, manifest, recorded

from elastic.core.checkpoint.recut import Recut, Stored, change_of_slices
from elastic.core.errors import ModelMismatch, UsageError
from elastic.core.sharding import cuts
from elastic.core.sharding.cuts import Box, Cut

COLUMNS = Cut.evenly(1, (5, 4), 4)


def test_slices_to_slices() -> None:
    found = Recut.of(recorded(cuts.to_json({"b": ROWS})), {"b": COLUMNS}, 3, 4)
    assert found.manifest.parameters == {**SHAPES, "b": (5, 1)}
    assert found.manifest.tp == 1
    first = recorded({}).digests
    assert found.manifest.digests["fp32/a"] == first["fp32/a@tp0"], "whole in both: as it was saved"
    assert found.manifest.digests["fp32/b"] == 0, "of these slices nobody knows it"
    assert {box.lane for box in found.boxes("b", 0, 5)} == {0, 1}
    assert found.boxes("a", 2, 7) == [Box(0, 2, 5, 0, 5, 1, 5)], "of the first lane"
    assert found.boxes("a", 2, 2) == []
    stored = {(each.key, each.lane): each for each in found.stored()}
    assert stored["fp32/b", 1] == Stored("fp32/b", 1, 8, first["fp32/b@tp1"])
    assert [lane for key, lane in stored if key == "exp_avg/a"] == [0]


def test_slices_to_whole_tensors_and_back() -> None:
    joined = Recut.of(recorded(cuts.to_json({"b": ROWS})), {}, 0, 1)
    assert joined.manifest.parameters["b"] == (5, 4)
    assert [(box.lane, box.rows * box.width) for box in joined.boxes("b", 0, 20)] == [(0, 8), (0, 4), (1, 8)]
    parted = Recut.of(manifest(), {"b": Cut.evenly(1, (3, 4), 2)}, 1, 2)
    assert parted.manifest.parameters["b"] == (3, 2)
    assert parted.boxes("b", 0, 6) == [Box(0, 2, 4, 0, 2, 3, 2)]
    assert {each.lane for each in parted.stored()} == {0}


def test_a_parameter_of_another_shape_is_of_another_model() -> None:
    with pytest.raises(ModelMismatch, match=r"'b' has shape \(6, 4\) here before it is cut, \(3, 4\) in the"):
        Recut.of(manifest(), {"b": Cut.evenly(0, (6, 4), 2)}, 0, 2)


@pytest.mark.parametrize(
    ("whole", "here", "said"),
    [
        (recorded("nothing"), None, "cannot be read"),
        (manifest(), None, "no mesh.tp and cannot be restored with mesh: {tp: 2}: nobody knows which parts"),
        (manifest(), {"b": "it is scaled"}, "nobody knows which part of 'b' the slices are here: it is scaled"),
        (recorded(cuts.to_json({"b": "as it is"})), {}, "slices of 'b' cannot be put together: as it is"),
    ],
)
def test_what_nobody_knows_is_refused(whole: Any, here: Any, said: str) -> None:
    with pytest.raises(Exception, match=said):
        Recut.of(whole, here, 0, 2)


def test_a_checkpoint_of_an_older_release_is_refused() -> None:
    whole = recorded({})
    del whole.extra_state["cuts"]  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"older release: resume the run with the same mesh\.tp"):
        Recut.of(whole, {}, 0, 1)


def test_what_changes_is_said_in_one_sentence() -> None:
    assert change_of_slices((2,), (1,)) == (
        "saved with mesh: {tp: 2} and resumed with no mesh.tp: dropout inside layers that are cut is drawn anew, and "
        "all else goes on as it was"
    )
    assert change_of_slices((2,), (1, 2)).startswith("saved with mesh: {tp: 2} and resumed with mesh: {tp: [1, 2]}: ")

"""Ranks as a grid: who shares sequences or layers with whom, and which world sizes are whole cells."""

from __future__ import annotations

import pytest

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, MeshSettings, whole_cells


def test_every_rank_has_a_place_of_its_own_and_its_cell_are_its_neighbours() -> None:
    mesh = Mesh.of(12, 3)
    assert mesh.axes == {"dp": 4, "sp": 3, "tp": 1}
    places = [mesh.coordinates(rank) for rank in range(12)]
    assert places == [{"dp": data, "sp": sequence, "tp": 0} for data in range(4) for sequence in range(3)]
    for rank in range(12):
        assert rank in mesh.cell(rank)
        assert [mesh.data(other) for other in mesh.cell(rank)] == [mesh.data(rank)] * 3
        assert [mesh.sequence(other) for other in mesh.cell(rank)] == [0, 1, 2]


def test_ranks_that_share_layers_are_neighbours_and_a_lane_has_one_of_each_cell() -> None:
    """As DeepSpeed's AutoTP has them: rank = data coordinate * tp + tensor coordinate."""
    mesh = Mesh.of(12, tp=4)
    assert mesh.axes == {"dp": 3, "sp": 1, "tp": 4}
    assert [mesh.tensor(rank) for rank in mesh.cell(6)] == [0, 1, 2, 3]
    assert {mesh.data(rank) for rank in mesh.cell(6)} == {1}
    assert [rank for rank in range(12) if mesh.tensor(rank) == 2] == [2, 6, 10]
    assert {mesh.sequence(rank) for rank in range(12)} == {0}, "all of a cell draw the same dropout"


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_coordinates_and_ranks_are_one_to_one(sp: int, tp: int) -> None:
    mesh = Mesh.of(24, sp, tp)
    assert mesh.per_cell == sp * tp
    for rank in range(24):
        at = mesh.coordinates(rank)
        assert (at["dp"] * sp + at["sp"]) * tp + at["tp"] == rank
        assert at["sp"] < sp
        assert at["tp"] < tp


def test_without_a_mesh_each_rank_is_a_cell() -> None:
    mesh = Mesh.of(5)
    assert [list(mesh.cell(rank)) for rank in range(5)] == [[rank] for rank in range(5)]


@pytest.mark.parametrize(
    ("world_size", "sp", "tp", "said"),
    [
        (3, 2, 1, r"3 ranks are not whole cells of 2 \(mesh: {sp: 2}\)"),
        (2, 4, 1, r"2 ranks are not whole cells of 4 \(mesh: {sp: 4}\)"),
        (4, 0, 1, r"4 ranks are not whole cells of 0 \(mesh: {sp: 0}\)"),
        (5, 1, 2, r"5 ranks are not whole cells of 2 \(mesh: {tp: 2}\)"),
    ],
)
def test_a_world_of_other_than_whole_cells_is_refused(world_size: int, sp: int, tp: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Mesh.of(world_size, sp, tp)


def test_workers_are_counted_in_whole_cells() -> None:
    assert [whole_cells(workers, 4) for workers in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert str(MeshSettings(2)) == "mesh: {sp: 2}"
    assert str(MeshSettings(tp=4)) == "mesh: {tp: 4}"
    assert MeshSettings(tp=4).cell == 4

"""Ranks as a grid: who shares sequences with whom, and which world sizes are whole cells."""

from __future__ import annotations

import pytest

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, MeshSettings, whole_cells


def test_every_rank_has_a_place_of_its_own_and_its_cell_are_its_neighbours() -> None:
    mesh = Mesh.of(12, 3)
    assert mesh.axes == {"dp": 4, "sp": 3}
    places = [mesh.coordinates(rank) for rank in range(12)]
    assert places == [{"dp": data, "sp": sequence} for data in range(4) for sequence in range(3)]
    for rank in range(12):
        assert rank in mesh.cell(rank)
        assert [mesh.data(other) for other in mesh.cell(rank)] == [mesh.data(rank)] * 3
        assert [mesh.sequence(other) for other in mesh.cell(rank)] == [0, 1, 2]


def test_without_a_mesh_each_rank_is_a_cell() -> None:
    mesh = Mesh.of(5, 1)
    assert [list(mesh.cell(rank)) for rank in range(5)] == [[rank] for rank in range(5)]


@pytest.mark.parametrize(("world_size", "sp"), [(3, 2), (2, 4), (4, 0)])
def test_a_world_of_other_than_whole_cells_is_refused(world_size: int, sp: int) -> None:
    with pytest.raises(UsageError, match=rf"{world_size} ranks are not whole cells of {sp} \(mesh: {{sp: {sp}}}\)"):
        Mesh.of(world_size, sp)


def test_workers_are_counted_in_whole_cells() -> None:
    assert [whole_cells(workers, 4) for workers in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert str(MeshSettings(2)) == "mesh: {sp: 2}"

"""Ranks as a grid: who shares sequences, layers or experts with whom, and which world sizes are whole cells."""

from __future__ import annotations

import pytest

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, MeshSettings, whole_cells


def test_every_rank_has_a_place_of_its_own_and_its_cell_are_its_neighbours() -> None:
    mesh = Mesh.of(12, 3)
    assert mesh.axes == {"dp": 4, "sp": 3, "tp": 1, "ep": 1, "pp": 1}
    places = [mesh.coordinates(rank) for rank in range(12)]
    assert places == [
        {"dp": data, "sp": sequence, "tp": 0, "ep": 0, "pp": 0} for data in range(4) for sequence in range(3)
    ]
    for rank in range(12):
        assert rank in mesh.cell(rank)
        assert [mesh.data(other) for other in mesh.cell(rank)] == [mesh.data(rank)] * 3
        assert [mesh.sequence(other) for other in mesh.cell(rank)] == [0, 1, 2]


def test_ranks_that_share_layers_are_neighbours_and_a_lane_has_one_of_each_cell() -> None:
    """As DeepSpeed's AutoTP has them: rank = data coordinate * tp + tensor coordinate."""
    mesh = Mesh.of(12, tp=4)
    assert mesh.axes == {"dp": 3, "sp": 1, "tp": 4, "ep": 1, "pp": 1}
    assert [mesh.tensor(rank) for rank in mesh.cell(6)] == [0, 1, 2, 3]
    assert {mesh.data(rank) for rank in mesh.cell(6)} == {1}
    assert [rank for rank in range(12) if mesh.tensor(rank) == 2] == [2, 6, 10]
    assert {mesh.sequence(rank) for rank in range(12)} == {0}, "all of a cell draw the same dropout"


def test_ranks_that_share_experts_are_neighbours_with_samples_of_their_own() -> None:
    mesh = Mesh.of(12, ep=4)
    assert mesh.axes == {"dp": 12, "sp": 1, "tp": 1, "ep": 4, "pp": 1}
    assert mesh.per_cell == 1
    assert [mesh.coordinates(rank) for rank in range(12)] == [
        {"dp": rank, "sp": 0, "tp": 0, "ep": rank % 4, "pp": 0} for rank in range(12)
    ]
    assert [rank for rank in range(12) if mesh.expert(rank) == 2] == [2, 6, 10], "these have the same experts"
    with pytest.raises(UsageError, match=r"6 ranks are not whole cells of 4 \(mesh: {ep: 4}\)"):
        Mesh.of(6, ep=4)


def test_the_stages_of_a_pipeline_are_neighbours_and_a_lane_has_one_of_each() -> None:
    mesh = Mesh.of(12, pp=4)
    assert mesh.axes == {"dp": 3, "sp": 1, "tp": 1, "ep": 1, "pp": 4}
    assert [mesh.stage(rank) for rank in mesh.cell(6)] == [0, 1, 2, 3]
    assert {mesh.data(rank) for rank in mesh.cell(6)} == {1}
    assert [rank for rank in range(12) if mesh.stage(rank) == 2] == [2, 6, 10], "these have the same layers"
    assert MeshSettings(pp=4).readers == 4
    with pytest.raises(UsageError, match=r"6 ranks are not whole cells of 4 \(mesh: {pp: 4}\)"):
        Mesh.of(6, pp=4)


def test_ranks_that_share_the_layers_of_a_stage_are_the_nearest_neighbours() -> None:
    mesh = Mesh.of(24, tp=2, pp=3)
    assert mesh.axes == {"dp": 4, "sp": 1, "tp": 2, "ep": 1, "pp": 3}
    assert [(mesh.stage(rank), mesh.tensor(rank)) for rank in mesh.cell(9)] == [
        (stage, tensor) for stage in range(3) for tensor in range(2)
    ]
    assert list(mesh.along("tp", 9)) == [8, 9]
    assert list(mesh.along("pp", 9)) == [7, 9, 11]
    lane = [rank for rank in range(24) if (mesh.stage(rank), mesh.tensor(rank)) == (1, 1)]
    assert lane == [rank for rank in range(24) if mesh.lane(rank) == mesh.lane(9)] == [3, 9, 15, 21]
    assert str(MeshSettings(tp=2, pp=3, choices={"pp": (1, 3)})) == "mesh: {tp: 2, pp: [1, 3]}"
    assert MeshSettings(tp=2, pp=3, choices={"pp": (1, 3)}).cells == (2, 6)


def test_ranks_that_share_the_experts_of_a_stage_are_of_neighbouring_pipelines() -> None:
    mesh, settings = Mesh.of(12, ep=2, pp=3), MeshSettings(ep=2, pp=3, choices={"ep": (1, 2), "pp": (2, 3)})
    assert mesh.axes == {"dp": 4, "sp": 1, "tp": 1, "ep": 2, "pp": 3}
    assert [rank for rank in range(12) if mesh.stage(rank) == 1] == [1, 4, 7, 10], "these have the same layers"
    assert [mesh.expert(rank) for rank in (1, 4, 7, 10)] == [0, 1, 0, 1]
    assert (settings.cells, settings.readers, str(settings)) == ((2, 3, 4, 6), 3, "mesh: {ep: [1, 2], pp: [2, 3]}")
    with pytest.raises(UsageError, match=r"9 ranks are not whole cells of 6 \(mesh: {ep: 2, pp: 3}\)"):
        Mesh.of(9, ep=2, pp=3)


@pytest.mark.parametrize(("sp", "tp", "pp"), [(1, 1, 1), (3, 1, 1), (1, 3, 1), (2, 3, 1), (2, 1, 3), (2, 3, 2)])
def test_coordinates_and_ranks_are_one_to_one(sp: int, tp: int, pp: int) -> None:
    mesh = Mesh.of(24, sp, tp, ep=24 // (sp * tp * pp), pp=pp)
    assert mesh.per_cell == sp * tp * pp
    for rank in range(24):
        at = mesh.coordinates(rank)
        assert ((at["dp"] * pp + at["pp"]) * sp + at["sp"]) * tp + at["tp"] == rank
        assert all(at[axis] < size for axis, size in mesh.axes.items())
        assert mesh.lane(rank) == at["pp"] * tp + at["tp"]
        lane, place = mesh.lane(rank) * mesh.ep + at["ep"], at["dp"] // mesh.ep * mesh.sp + at["sp"]
        assert mesh.part(rank) == (lane, mesh.lanes * mesh.ep, place, mesh.dp // mesh.ep * mesh.sp)
        for axis, size in (("sp", sp), ("tp", tp), ("pp", pp)):
            others = [mesh.coordinates(other) for other in mesh.along(axis, rank)]
            assert others == [{**at, axis: place} for place in range(size)], "apart in that alone, in its order"


@pytest.mark.parametrize(
    ("mesh", "alike"),
    [
        (Mesh.of(8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Mesh.of(8, sp=2), [1, 3, 5, 7]),
        (Mesh.of(8, tp=2), [1, 3, 5, 7]),
        (Mesh.of(8, ep=4), [1, 5]),
        (Mesh.of(8, tp=2, pp=2), [1, 5]),
        (Mesh.of(8, ep=2, pp=2), [1, 5]),
    ],
)
def test_ranks_that_do_the_same_share_of_a_cell(mesh: Mesh, alike: list[int]) -> None:
    assert [rank for rank in range(8) if mesh.same_share(rank, 1)] == alike


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
    assert str(MeshSettings(ep=2)) == "mesh: {ep: 2}"
    settings = [MeshSettings(sp=3), MeshSettings(tp=4), MeshSettings(ep=2)]
    assert [(each.cell, each.readers) for each in settings] == [(3, 3), (4, 4), (2, 1)]


def test_what_ranks_of_a_generation_share() -> None:
    settings = MeshSettings(tp=4, choices={"tp": (2, 4)})
    assert settings.shared({"tp": 2}, 8) == {"dp": 4, "tp": 2}
    assert settings.shared({"tp": 4}, 4) == {"tp": 4}
    assert settings.shared({"tp": 4}, 0) == {}, "no generation"
    assert MeshSettings().shared({}, 8) == {}, "data parallel ranks share nothing"

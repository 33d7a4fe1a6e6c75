"""Whole runs whose ranks share sequences, or layers: nodes are killed and added; the oracle is the undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run

from elastic.core.mesh import MeshSettings
from elastic.core.settings import ScalingSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Additions in another order, in fp32.
CEILING = 4e-6


# What ranks share, and the function that shares it.
SHARED = [
    pytest.param("shared_sequences:train", MeshSettings(sp=2), id="sequences"),
    pytest.param("shared_layers:train", MeshSettings(tp=2), id="layers"),
]


@pytest.mark.parametrize(("function", "mesh"), SHARED)
def test_cells_lose_nodes_form_anew_and_grow(
    cluster: LocalCluster, tmp_path: Path, function: str, mesh: MeshSettings
) -> None:
    still = started(cluster, tmp_path / "still", "still", function, mesh)
    still.allow(1 << 30)
    still.start().finish()

    run = started(cluster, tmp_path / "moved", "moved", function, mesh)
    run.allow(7)
    run.start()
    run.reach(7)
    run.wait_snapshot(7)
    # Two cells; of one a node is lost. The other's two ranks continue, or a pair of both; one worker stands by.
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 2
    run.allow(12)
    run.reach(12)
    run.wait_snapshot(12)
    # The worker that stands by takes the place of the one that is lost.
    run.cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(3)
    assert run.handle.progress()["world_size"] == 2
    run.allow(18)
    run.reach(18)
    run.cluster.add_node()
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()

    assert {generation["world_size"] for generation in run.summary()["generations"]} == {2, 4}
    run.assert_whole()
    assert list(run.losses()) == list(still.losses())
    for step, loss in run.losses().items():
        assert loss == pytest.approx(still.losses()[step], rel=CEILING, abs=CEILING), f"step {step}"


def started(cluster: LocalCluster, folder: Path, run_id: str, function: str, mesh: MeshSettings) -> Run:
    folder.mkdir()
    run = Run(
        cluster,
        folder,
        function,
        run_id=run_id,
        scaling=ScalingSettings(2, 4),
        memory={"every_steps": 1},
        every_steps=None,
    )
    run.settings = replace(run.settings, mesh=mesh)
    return run

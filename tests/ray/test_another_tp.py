"""Whole runs whose workers share each layer by other numbers after each loss: nodes are killed and added; the oracle is
one worker with whole layers, undisturbed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_cluster import LocalCluster
from harness import Run

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.mesh import MeshSettings
from elastic.core.settings import ScalingSettings
from elastic.engines.live_state import BUFFER
from elastic.interchange.tensors import CheckpointTensors

pytestmark = pytest.mark.ray

# Additions in another order, in fp32: of losses, and of weights that AdamW has made of them.
CEILING, WEIGHTS = 4e-6, 1e-5


def started(cluster: LocalCluster, folder: Path, engine: str, scaling: ScalingSettings, mesh: MeshSettings) -> Run:
    folder.mkdir()
    run = Run(
        cluster,
        folder,
        "shared_work:layers",
        run_id=folder.name,
        scaling=scaling,
        memory={"every_steps": 1},
        every_steps=None,
        config={"engine": engine, "stage": 1},
    )
    run.settings = replace(run.settings, mesh=mesh)
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    """What the run has saved at its end, put together; but for the buffer that counts the passes of one worker."""
    store = CheckpointStore(run.url, run.settings.run_id)
    whole = CheckpointTensors(store, store.manifest(store.list()[0].id))
    return {name: whole.read(name) for name, told in whole.tensors.items() if told.kind != BUFFER}


# (world size, tp) by generation: each but the last ends with a lost node. torch shares sizes evenly.
@pytest.mark.parametrize(
    ("engine", "sizes", "low", "expected"),
    [
        pytest.param("deepspeed", (2, 3, 4), 2, [(4, 4), (3, 3), (2, 2), (4, 2)], id="deepspeed"),
        pytest.param("fsdp2", (1, 2), 1, [(4, 2), (2, 2), (2, 2), (1, 1), (4, 1)], id="fsdp2", marks=pytest.mark.slow),
    ],
)
def test_layers_are_shared_by_as_many_as_each_generation_can(
    cluster: LocalCluster, tmp_path: Path, engine: str, sizes: tuple[int, ...], low: int, expected: list[Any]
) -> None:
    still = started(cluster, tmp_path / "still", engine, ScalingSettings(1, 1), MeshSettings())
    still.allow(1 << 30)
    still.start().finish()

    mesh = MeshSettings(tp=max(sizes), choices={"tp": sizes})
    run = started(cluster, tmp_path / "moved", engine, ScalingSettings(low, 4), mesh)
    step = 7
    run.allow(step)
    run.start()
    for number in range(2, len(expected)):
        run.reach(step)
        run.wait_snapshot(step)
        run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
        step += 4
        run.wait_generation(number)
        run.allow(step)
    run.reach(step)
    for _ in expected[1:-1]:
        run.cluster.add_node()
    run.grow_to(4)
    run.finish()

    taken = [(told["world_size"], run.meshes()[told["number"]]["tp"]) for told in run.summary()["generations"]]
    # On a busy machine the run grows by steps.
    assert (taken[: len(expected) - 1], taken[-1]) == (expected[:-1], expected[-1])
    assert {incident["source"] for incident in run.summary()["incidents"]} == {"memory"}
    assert len([said for said in run.decisions("start") if "dropout inside layers that are cut" in said]) == 1
    run.assert_whole()
    assert list(run.losses()) == list(still.losses())
    for number, loss in run.losses().items():
        assert loss == pytest.approx(still.losses()[number], rel=CEILING, abs=CEILING), f"step {number}"
    before, after = weights(still), weights(run)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.allclose(value, after[name], atol=WEIGHTS, rtol=0), name


def test_any_number_that_the_model_allows(cluster: LocalCluster, tmp_path: Path) -> None:
    """`tp: any`. By three its steps would be the shortest, and of 20 words three workers have no equal parts."""
    still = started(cluster, tmp_path / "still", "fsdp2", ScalingSettings(1, 1), MeshSettings())
    still.allow(1 << 30)
    still.start().finish()

    mesh = MeshSettings(tp=3, choices={"tp": (1, 2, 3)}, any_tp=True)
    run = started(cluster, tmp_path / "moved", "fsdp2", ScalingSettings(1, 3), mesh)
    # Five micro-batches take three workers the time of two; with layers shared by three, that of five thirds.
    run.settings = replace(run.settings, global_batch=10, micro_batch=2)
    run.allow(7)
    run.start()
    run.reach(7)
    run.wait_snapshot(7)
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(3)
    run.allow(1 << 30)
    run.finish()

    taken = [(told["world_size"], run.meshes()[told["number"]]["tp"]) for told in run.summary()["generations"]]
    # A fourth node takes the place of the lost one.
    assert taken[:3] == [(3, 3), (3, 1), (2, 1)]
    assert {tp for _, tp in taken[3:]} <= {1}
    refused, lost = run.summary()["incidents"][:2]
    assert (refused["kind"], lost["kind"], lost["source"]) == ("mesh-refused", "node-lost", "memory")
    assert "which 3 workers cannot share evenly" in refused["evidence"]
    assert not [said for said in run.decisions("mesh") if "drawn anew" in said], "before the first step"
    run.assert_whole()
    assert list(run.losses()) == list(still.losses())
    for number, loss in run.losses().items():
        assert loss == pytest.approx(still.losses()[number], rel=CEILING, abs=CEILING), f"step {number}"

"""A whole run whose workers report the memory that they really take, and a loss after which that decides the mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import Run
from test_mesh import started

from elastic.core.mesh import MeshSettings

pytestmark = pytest.mark.ray

PLENTY = 2 << 30


def after_a_loss(cluster: LocalCluster, folder: Path, name: str, worker_bytes: int) -> tuple[Run, Any]:
    """Four workers in cells of two, of which one is lost; also what they have measured."""
    experts = MeshSettings(ep=2, choices={"ep": (1, 2)})
    run = started(cluster, folder / name, name, "shared_experts:train_routed", experts, "fsdp2")
    resources = {**run.settings.resources_per_worker, "memory": worker_bytes}
    run.settings = replace(run.settings, resources_per_worker=resources)
    run.allow(7)
    run.start()
    run.reach(7)
    run.wait_snapshot(7)
    (told,) = [r for r in run.records("event") if r["event"] == "MemoryMeasured"]
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    run.allow(1 << 30)
    run.cluster.add_node()
    run.finish()
    run.assert_whole()
    return run, told


def meshes_of(run: Run) -> list[Any]:
    return [note["data"]["meshes"] for note in run.records("decision") if note["kind"] == "mesh"]


def test_a_mesh_that_would_not_fit_into_what_ray_reserves_is_not_tried(cluster: LocalCluster, tmp_path: Path) -> None:
    plenty, told = after_a_loss(cluster, tmp_path, "plenty", PLENTY)
    first, second, *_ = meshes_of(plenty)
    assert [(row["axes"]["ep"], row["world_size"]) for row in first if row["chosen"]] == [(2, 4)]
    assert not any("peak_bytes" in row for row in first), "nothing was measured yet"
    assert [(row["axes"]["ep"], row["world_size"]) for row in second if row["chosen"]] == [(1, 3)]
    assert told["held"]["passes"] == 5, "ten samples by two: fewer workers add up more of them"
    assert 0 < told["rest_bytes"] < told["limit_bytes"] < PLENTY
    alone = next(row for row in second if row["axes"]["ep"] == 1)
    assert 2 * told["rest_bytes"] < alone["peak_bytes"] < PLENTY, "the rest could grow with each rank's experts"

    # Room for what the mesh with shared experts has taken, and for half of it again, but not for twice as much.
    libraries = PLENTY - told["limit_bytes"]
    short, _ = after_a_loss(cluster, tmp_path, "short", libraries + int(1.5 * told["rest_bytes"]))
    _, second, *_ = meshes_of(short)
    assert [(row["axes"]["ep"], row["world_size"]) for row in second if row["chosen"]] == [(2, 2)]
    refused = next(row for row in second if row["axes"]["ep"] == 1)
    assert refused["refusal"].startswith("memory would not suffice: ")
    assert refused["peak_bytes"] > refused["limit_bytes"]

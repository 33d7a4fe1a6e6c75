"""A node that promises a GPU to Ray and has none that torch could use: no run trains on its CPU instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
import torch
from elastic_cluster import LocalCluster
from harness import Run

from elastic.core.settings import ScalingSettings

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="torch would find the device"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """One node with a logical GPU."""
    with pytest.MonkeyPatch.context() as patch:
        # Its processes inherit the environment, and a test before this one may have asked for the CPU.
        patch.delenv("DS_ACCELERATOR", raising=False)
        yield from harness.module_cluster(1, cpus_per_node=2, gpus_per_node=1)


def test_a_gpu_that_torch_does_not_see_ends_the_run_naming_both(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, scaling=ScalingSettings(1, 1), resources={"GPU": 1, "CPU": 1}).start()
    reason = run.ended("usage")["reason"]
    assert "Ray reserves GPU 0 of node" in reason
    assert f"but torch {torch.__version__} is a build without GPU support" in reason

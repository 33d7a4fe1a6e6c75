"""Ray Train's shape, and scheduling by GPU with logical ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import loops
import pytest
import ray
from elastic_cluster import LocalCluster
from elastic_jobs.trainer import ElasticTrainer
from harness import Run
from ray.train import CheckpointConfig, RunConfig, ScalingConfig

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.errors import UsageError, UserCodeError
from elastic.core.settings import ScalingSettings, SinkSettings

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Two nodes with one logical GPU each, and room for more workers than that."""
    environment = {"DS_ACCELERATOR": "cpu"}
    yield from harness.module_cluster(2, cpus_per_node=2, gpus_per_node=1, environment=environment)


def test_a_gpu_is_what_a_worker_needs_of_a_node(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, scaling=ScalingSettings(1, 3), resources={"GPU": 1, "CPU": 1})
    run.allow(6)
    run.start()
    run.reach(6)
    workers = run.handle.progress()["workers"]
    # One on each node: a third would find a CPU, but no GPU.
    assert sorted(w["node"] for w in workers) == sorted(node.node_id for node in cluster.nodes())
    run.finish()
    run.assert_whole()
    assert [generation["world_size"] for generation in run.summary()["generations"]] == [2]


def test_the_trainer_takes_and_gives_what_ray_trains_does(cluster: LocalCluster, tmp_path: Path) -> None:
    def trainer(name: str, config: dict[str, Any]) -> ElasticTrainer:
        return ElasticTrainer(
            loops.train,
            train_loop_config={"size": 127, "folder": str(tmp_path), **config},
            scaling_config=ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name=name, storage_path=str(tmp_path / "runs"), checkpoint_config=CheckpointConfig(num_to_keep=1)
            ),
            epochs=2,
            checkpoint_every_steps=5,
        )

    made = trainer("good", {"metrics": True})
    gauges, lines = tmp_path / "run.prom", tmp_path / "run.jsonl"
    sinks = (SinkSettings("prometheus", str(gauges)), SinkSettings("jsonl", str(lines)))
    # The second one cannot be opened: the run is none the worse for it.
    broken = SinkSettings("jsonl", "/proc/no/such/place")
    made.settings = dataclasses.replace(made.settings, sinks=(*sinks, broken))
    result = made.fit()
    assert 'elastic_step{run="good"} 26\n' in gauges.read_text()
    assert 'elastic_metric{run="good",name="rank"} 1.5\n' in gauges.read_text()
    assert 'elastic_running{run="good"} 0\n' in gauges.read_text()
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [step["step"] for record in written if record["type"] == "steps" for step in record["steps"]] == [
        *range(1, 27)
    ]
    assert isinstance(result, ray.train.Result)
    assert result.error is None
    assert result.metrics is not None
    assert (result.metrics["step"], result.metrics["status"]) == (26, "finished")
    assert result.metrics["loss"] < 5.0
    compute = result.metrics["compute"]
    assert compute["model_flops"] == compute["sample_flops"] * 254 > 0
    assert compute["accelerator_s"]["productive"] > 0.0
    assert compute["energy_j"] is None
    assert result.metrics["rank"] == 1.5, "the mean of both ranks, in step 26"
    assert result.metrics_dataframe is not None
    assert list(result.metrics_dataframe["step"]) == list(range(1, 27))
    assert list(result.metrics_dataframe["rank"]) == [0.5, 1.5] * 13
    store = CheckpointStore(str(tmp_path / "runs"), "good")
    (newest,) = store.list()
    assert newest.step == 26
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path) == tmp_path / "runs" / "good" / "checkpoints" / newest.id
    assert Path(result.path) == tmp_path / "runs" / "good"
    assert store.verify_shards(store.manifest(newest.id)) > 0

    with pytest.raises(UserCodeError, match="the user's own mistake on rank 0") as raised:
        trainer("bad", {"fault": {"kind": "raise", "rank": 0, "step": 3}}).fit()
    assert "loops.py" in str(raised.value.__cause__)
    with pytest.raises(UsageError, match="greater than or equal to 1"):
        ElasticTrainer(loops.train, scaling_config=ScalingConfig(num_workers=(0, 2)))

"""Functions written for Ray Train: its report, context and checkpoint inside of a generation."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.comm.rendezvous import host_store
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.engines import when_imported
from elastic.runtime.worker import ray_train_face
from elastic.training.local import run_local

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def face() -> Iterator[None]:
    ray_train_face.install()
    yield
    module: Any = sys.modules.get(ray_train_face._HOME)
    if module is not None:
        module.set_train_fn_utils(None)
    when_imported.forget(ray_train_face._HOME)


def run(train: Any, url: Path) -> Any:
    spec = GenerationSpec("script", 1, 0, 1, batch=BatchSettings(max_steps=2))
    return run_local(train, None, spec, host_store("127.0.0.1"), str(url))


def build() -> tuple[Any, Any]:
    import elastic

    model = nn.Linear(4, 1)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
        training_data=[torch.full((4,), float(i)) for i in range(12)],
        config={"train_batch_size": 6},
    )
    return engine, loader


def test_report_context_and_checkpoint(tmp_path: Path) -> None:
    seen: list[Any] = []

    def train() -> None:
        # The face is there also where Ray Train is imported by the function only.
        import ray.train.collective

        context = ray.train.get_context()
        seen.append((context.get_world_rank(), context.get_world_size(), context.get_experiment_name()))
        seen.append(ray.train.get_checkpoint())
        engine, loader = build()
        for x in loader:
            engine.backward(engine(x).mean())
            ray.train.report({"answer": 42})
            engine.step()
            with tempfile.TemporaryDirectory() as folder:
                # Ray Train's own DeepSpeed example.
                engine.save_checkpoint(folder)
                ray.train.report({"later": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        ray.train.collective.barrier()
        seen.append(ray.train.collective.broadcast_from_rank_zero({"x": 1}))

    result, coordinator = run(train, tmp_path)
    assert result.kind == "finished", result.traceback
    assert seen == [(0, 1, "script"), None, {"x": 1}]
    assert [dict(report.metrics) for report in coordinator.reports] == [{"answer": 42, "later": 1.0}] * 2


def _own_files() -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        torch.save({}, f"{folder}/model.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _shard() -> None:
    import ray.train

    ray.train.get_dataset_shard("train")


def _node_rank() -> None:
    import ray.train

    ray.train.get_context().get_node_rank()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (_own_files, "files of your own are not kept by an elastic run"),
        (_shard, "pass a map-style dataset or a DataLoader as training_data="),
        (_node_rank, "get_node_rank() is not known in an elastic run"),
    ],
)
def test_what_cannot_be_answered_says_what_to_write(train: Any, message: str, tmp_path: Path) -> None:
    result, _ = run(train, tmp_path)
    assert result.kind == "usage_error", result.traceback
    assert message in result.message

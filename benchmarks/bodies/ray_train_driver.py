"""The driver of Ray Train v2, elastic, with DeepSpeed; its workers run `train` below.

As https://docs.ray.io/en/latest/train/user-guides/elastic-training.html and .../train/deepspeed.html show it. `argv`:
address, size, stage, smallest and largest number of workers, folder, steps between checkpoints.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.bodies import deepspeed_alone
from benchmarks.marks import MarkWriter


def train(config: dict[str, Any]) -> None:
    import torch
    from ray import train as ray_train

    saved: Any = ray_train.get_checkpoint()
    size, stage = workload.SIZES[config["size"]], config["stage"]
    if saved is None:
        engine, batches = deepspeed_alone.make_engine(size, stage)
    else:
        with saved.as_directory() as folder:
            engine, batches = deepspeed_alone.restore(size, stage, Path(folder))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # A worker group has a rendezvous of its own, and so a port.
    era, marks = int(os.environ["MASTER_PORT"]), MarkWriter(config["marks"])
    for step in deepspeed_alone.steps(engine, batches):
        marks.step_done(step, rank, world_size, era)
        if step % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                deepspeed_alone.save(engine, Path(folder))
                torch.distributed.barrier()
                ray_train.report({"step": step}, checkpoint=ray_train.Checkpoint.from_directory(folder))


def main(address: str, size: str, stage: str, smallest: str, largest: str, folder: str, every: str) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=address)
    workers: Any = (int(smallest), int(largest))
    trainer = TorchTrainer(
        train,
        train_loop_config={"size": size, "stage": int(stage), "marks": folder, "every": int(every)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="benchmark", storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
        ),
    )  # fmt: skip
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])

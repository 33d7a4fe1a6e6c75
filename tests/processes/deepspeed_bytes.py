"""Bytes that unmodified DeepSpeed holds on a rank of any world size, measured on its tensors, as JSON.

As a program: writes `{"<dtype>-<stage>-<rank>-of-<world size>": {"weights": ..., "master": ..., ...} or a traceback}`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from typing import Any

from deepspeed_ranks import GROUPS, join_fake
from lab.memory import gradient_bytes, master, moment_bytes, storages, weight_bytes

WORLDS = (2, 3, 8, 64, 1000, 1024)
STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
REDUCE_BUCKET = 5000
PERSISTENCE_THRESHOLD = 500


def make_engine(stage: int, dtype: str) -> Any:
    import deepspeed
    import torch

    class Flat(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            self.sums = [p.float().sum() for p in self.parameters()]
            return torch.stack(self.sums).sum()

    model = Flat()
    for name, numel in (tensor for group in GROUPS for tensor in group):
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.randn(numel)))
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name.replace(".", "_")] for name, _ in group]} for group in GROUPS]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": REDUCE_BUCKET,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config, dist_init_required=False
    )
    return engine


def measure(stage: int, dtype: str, rank: int, world_size: int) -> dict[str, int]:
    from deepspeed import comm

    from elastic.engines.deepspeed.teardown import release_engine

    join_fake(rank, world_size)
    engine = make_engine(stage, dtype)
    parameters, optimizer = list(engine.module.parameters()), engine.optimizer
    trained: dict[str, int] = {}
    # Stage 3 compares its order of modules with rank 0's before it trains, and rank 0 answers nothing here.
    if stage < 3 or rank == 0:
        trained["gradients"], trained["bucket"] = _train(engine, stage)
        trained["persistent"] = storages(parameters) if stage == 3 else 0
        trained["moments"] = moment_bytes(optimizer)
    found = {"weights": weight_bytes(engine, stage), "master": storages(master(optimizer))}
    release_engine(engine)
    comm.destroy_process_group()
    return found | trained


def _train(engine: Any, stage: int) -> tuple[int, int]:
    """Trains a step of two micro-batches. Returns bytes: gradients held until the step, bucket that reduces them."""
    engine.backward(engine())
    held = gradient_bytes(engine, stage) if stage < 2 else 0
    engine.step()
    loss, seen = engine(), [0]
    if stage:
        # Buckets exist from the first gradient to the last.
        for tensor in engine.module.sums:
            tensor.register_hook(lambda _: seen.append(storages(_bucket(engine.optimizer))))
    engine.backward(loss)
    if stage > 1:
        held = gradient_bytes(engine, stage)
    engine.step()
    return held, max(seen)


def _bucket(optimizer: Any) -> list[Any]:
    buffers = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    return [tensor for buffer in buffers for tensor in (buffer if isinstance(buffer, list) else [buffer])]


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found: dict[str, Any] = {}
    for dtype, stage, world_size in itertools.product(DTYPES, STAGES, WORLDS):
        for rank in (0, world_size - 1):
            try:
                found[f"{dtype}-{stage}-{rank}-of-{world_size}"] = measure(stage, dtype, rank, world_size)
            except Exception:  # noqa: BLE001 - the traceback is the verdict
                found[f"{dtype}-{stage}-{rank}-of-{world_size}"] = traceback.format_exc()
    with open(sys.argv[1], "w") as report:
        json.dump(found, report)


if __name__ == "__main__":
    main()

"""DeepSpeed's layers of experts trained by DeepSpeed alone: two ranks that share them, the same ones to the end."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from layered_model import text
from moe_model import EPS, EXPERTS, Mixture, groups_of, loss

from elastic.training.rng import forward_stream, seed_everything

WORLD_SIZE = 2


def train(rank: int, folder: Path) -> None:
    """As `plan.json` says: DeepSpeed's "config", the "seed" of passes, and "indices" of samples in their order."""
    import deepspeed
    import deepspeed.ops

    # Compiled at first use, which takes a minute, and used by inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD_SIZE)}
    store = dist.FileStore(str(folder / "group"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    plan = json.loads((folder / "plan.json").read_text())
    model = Mixture(ep_size=WORLD_SIZE)
    model.draw(rank * EXPERTS // WORLD_SIZE)
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups_of(model, "split"), lr=0.02, eps=EPS),
        config={**plan["config"], "zero_allow_untested_optimizer": True},
        dist_init_required=False,
    )
    batch, micro = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
    passes, losses = engine.gradient_accumulation_steps(), []
    for step, begin in enumerate(range(0, len(plan["indices"]), batch)):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(rank * passes, (rank + 1) * passes):
            first = begin + number * micro
            samples = [text(index) for index in plan["indices"][first : first + micro]]
            tokens, labels = (torch.stack(part) for part in zip(*samples, strict=True))
            seed_everything(*forward_stream(plan["seed"], step, number, 0))
            found = loss(engine(tokens), labels)
            engine.backward(found)
            engine.step()
            total += found.detach().double() / (passes * WORLD_SIZE)
        dist.all_reduce(total)
        losses.append(float(total))
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, folder / f"trained-{rank}.pt")

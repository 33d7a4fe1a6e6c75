"""DeepSpeed without this project, as its documentation shows it: training, native checkpoints, universal ones.

A native checkpoint belongs to one world size. For another it is converted (`ds_to_universal`) and loaded with
`load_universal`: https://www.deepspeed.ai/tutorials/universal-checkpointing/.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.workload import Size


def make_engine(size: Size, stage: int, *, universal: bool = False) -> tuple[Any, Any]:
    """(engine, endless iterator of micro batches). RANK, WORLD_SIZE and the master's address must be set."""
    workload.avoid_compiling()
    import deepspeed
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    world_size = torch.distributed.get_world_size()
    model, optimizer, data = workload.build(size)
    config = workload.deepspeed_config(size, stage, world_size)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    sampler: Any = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=config["train_micro_batch_size_per_gpu"], sampler=sampler, drop_last=True)
    return engine, itertools.chain.from_iterable(itertools.repeat(loader))


def steps(engine: Any, batches: Any, elsewhere_s: float = 0.0) -> Iterator[int]:
    """Trains for ever; gives the number of each optimizer step when it is done. Every pass sleeps `elsewhere_s`."""
    for windows in batches:
        time.sleep(elsewhere_s)
        engine.backward(engine(windows))
        # Before the step, which is when it says whether this micro batch is the last of one.
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last:
            yield int(engine.global_steps)


def save(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder), tag=f"step{engine.global_steps}")


def newest(folder: Path) -> str | None:
    """The tag of the last native checkpoint that is whole: DeepSpeed names it when every rank has written."""
    latest = folder / "latest"
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def convert(source: Path, target: Path) -> float:
    """`ds_to_universal` with its defaults, in a process of its own as its documentation shows it; its seconds."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ds_to_universal ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return time.monotonic() - begun


def restore(size: Size, stage: int, folder: Path) -> tuple[Any, Any]:
    """An engine of this world size with the newest checkpoint in it: converted by rank 0, while the others wait."""
    import torch

    tag = newest(folder)
    engine, batches = make_engine(size, stage, universal=tag is not None)
    if tag is not None:
        universal = folder / f"{tag}_universal"
        if torch.distributed.get_rank() == 0 and not (folder / f"{tag}_done").exists():
            convert(folder / tag, universal)
            (folder / f"{tag}_done").touch()
        torch.distributed.barrier()
        engine.load_checkpoint(str(folder), tag=universal.name)
    return engine, batches

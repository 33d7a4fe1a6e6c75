"""The one model, data and batch of all subjects: the GPT of `examples/gpt.py` at two sizes, and DeepSpeed configs.

A training function of this project; bodies of the peers in `benchmarks/bodies` train the same with their own means.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """A byte-level GPT; `batch` is the global batch in windows, `micro` the largest part of one pass of one rank."""

    name: str
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    micro: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# 0.8 million parameters: what is measured is the recovery and not the step.
SMALL = Size("small", width=128, layers=4, heads=4, context=64, batch=24, micro=8)
# 19 million parameters, 75 MB: a step of two workers takes little more than a second on two slow cores.
LARGE = Size("large", width=512, layers=6, heads=8, context=128, batch=8, micro=4)
# The same state with little to compute.
LARGE_LIGHT = Size("large-light", width=512, layers=6, heads=8, context=32, batch=2, micro=1)
# 85 million parameters, 1.0 GB of masters and moments, with as little to compute as goes.
BASE = Size("base", width=768, layers=12, heads=12, context=16, batch=12, micro=2)
# For tests: a second from start to end.
TINY = Size("tiny", width=32, layers=1, heads=2, context=16, batch=24, micro=8)
# A billion parameters, for one CUDA device: 2 GB of bf16 weights and 12 GB of masters and moments.
BILLION = Size("billion", width=2048, layers=20, heads=16, context=512, batch=8, micro=8)
# Three billion fill a device of 80 GB: 6 GB of bf16 weights, as much of gradients, and 35 GB of masters and moments. A
# restore finds no room for a second set of these.
THREE_BILLION = Size("three-billion", width=3072, layers=26, heads=24, context=512, batch=8, micro=2)
SIZES = {size.name: size for size in (SMALL, BASE, LARGE, LARGE_LIGHT, TINY, BILLION, THREE_BILLION)}


@cache
def example() -> ModuleType:
    """`examples/gpt.py`, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("benchmark_gpt", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(size: Size) -> tuple[Any, Any, Any]:
    """(model, AdamW, dataset); the same weights in every process."""
    import torch

    torch.manual_seed(0)
    gpt = example()
    model = gpt.GPT(size.width, size.layers, size.heads, size.context, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, gpt.Windows(gpt.stdlib_bytes(), size.context)


def deepspeed_config(size: Size, stage: int, world_size: int | None = None, bf16: bool = False) -> dict[str, Any]:
    """For this project the micro batch is a bound and the world size is left open; DeepSpeed alone needs both exact,
    and gets the fewest passes for which the batch divides."""
    micro = size.micro if world_size is None else micro_batch(size, world_size)
    return {
        "train_batch_size": size.batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
        **({"bf16": {"enabled": True}} if bf16 else {}),
    }


def micro_batch(size: Size, world_size: int) -> int:
    """The largest micro batch up to `size.micro` with which `world_size` ranks make up the batch exactly."""
    exact = [micro for micro in range(1, size.micro + 1) if size.batch % (micro * world_size) == 0]
    if not exact:
        raise ValueError(f"a batch of {size.batch} cannot be dealt to {world_size} ranks in equal parts")
    return exact[-1]


def avoid_compiling() -> None:
    """DeepSpeed alone would compile an operator at the first start, for a minute; this project does the same."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(config: dict[str, Any]) -> None:
    """This project's body. `config`: size (a name), stage and marks (a folder); and where wanted gate (a file), pace_s
    (the least time of a step), elsewhere_s (what every pass sleeps), set_up_s (what the function sleeps before it
    builds, when it has asked for its rank, as most scripts do first; it then holds a million objects, too), bf16,
    before_pass(step), after_step(engine, step), and form (of `benchmarks.bodies.meshes`)."""
    import elastic
    from benchmarks.marks import MarkWriter, pass_gate

    size = SIZES[config["size"]]
    set_up_s = config.get("set_up_s", 0.0)
    if set_up_s:
        int(os.environ["RANK"])
    time.sleep(set_up_s)
    # What a tokenizer or the index of a data set keeps.
    held = [[number] for number in range(1_000_000 if set_up_s else 0)]
    resolved = deepspeed_config(size, config["stage"], bf16=config.get("bf16", False))
    form = config.get("form", "")
    engine, _, loader, _ = elastic.initialize(**_arguments(form, size, resolved))
    marks = MarkWriter(config["marks"])
    gate, pace_s, after_step = config.get("gate"), config.get("pace_s", 0.0), config.get("after_step")
    before_pass = config.get("before_pass")
    begun = time.monotonic()
    for _ in elastic.epochs():
        for windows in loader:
            time.sleep(config.get("elsewhere_s", 0.0))
            if before_pass is not None:
                before_pass(elastic.get_context().step)
            if staged := form.endswith("pp 2"):
                # All micro-batches of a step.
                engine.train_batch(windows)
            else:
                engine.backward(engine(windows.to(engine.device)))
            last = staged or engine.is_gradient_accumulation_boundary()
            if last:
                # What an accelerator would compute meanwhile, without the processor.
                time.sleep(max(0.0, begun + pace_s - time.monotonic()))
            if not staged:
                engine.step()
            here = elastic.get_context()
            if last and not here.abandoned:
                marks.step_done(here.step, here.rank, here.world_size, here.generation)
                if after_step is not None:
                    after_step(engine, here.step)
                pass_gate(gate, here.step + 1)
                begun = time.monotonic()
    del held


def _arguments(form: str, size: Size, config: dict[str, Any]) -> dict[str, Any]:
    """Of `elastic.initialize`, on the mesh that is called `form`, or without one."""
    if form:
        from benchmarks.bodies import meshes

        return meshes.arguments(form, size, config)
    model, optimizer, data = build(size)
    return {"model": model, "optimizer": optimizer, "training_data": data, "config": config}

"""FSDP2 with tensor parallelism, without this project as torch's documentation shows it, and the same with it."""

from __future__ import annotations

from typing import Any

from benchmarks import workload
from benchmarks.workload import Size


def plan() -> dict[str, Any]:
    """Each MLP by columns and then by rows; attention stays whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}


def build(size: Size, tp: int) -> tuple[Any, Any, Any]:
    """(model, AdamW, dataset) over all ranks, of which `tp` share each MLP. RANK, WORLD_SIZE and the master's address
    must be set."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    torch.distributed.init_process_group("gloo")
    cells = torch.distributed.get_world_size() // tp
    mesh = init_device_mesh("cpu", (cells, tp), mesh_dim_names=("dp", "tp"))
    model, optimizer, data = workload.build(size)
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), **options(optimizer)), data


def train(model: Any, optimizer: Any, data: Any, steps: int) -> None:
    import torch

    for step in range(steps):
        model(torch.stack([data[2 * step], data[2 * step + 1]])).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_elastic(config: dict[str, Any]) -> None:
    """This project's body. `config`: size (a name)."""
    import elastic

    size = workload.SIZES[config["size"]]
    model, optimizer, data = workload.build(size)
    engine, _, loader, _ = elastic.initialize(
        model=model, optimizer=optimizer, training_data=data, tp_plan=plan(),
        config={"global_batch": size.batch, "micro_batch": size.micro},
    )  # fmt: skip
    for _ in elastic.epochs():
        for windows in loader:
            engine.backward(engine(windows))
            engine.step()


def options(optimizer: Any) -> dict[str, Any]:
    return {name: optimizer.defaults[name] for name in ("lr", "betas", "weight_decay")}

"""A training function that agrees on things in its set-up, by collectives of its own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import crew
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from trainings import build, one_pass

import elastic

# What each call of a function was given, in one process.
KEPT: list[Any] = []


def agrees(config: dict[str, Any]) -> None:
    """On a run's name, as scripts for wandb do; with "counts" on sums, with "lists" on what each of them has, with
    "big" on more than is kept for others. Where a file is there, on something else."""
    import deepspeed

    calls = crew.told["calls"] = crew.told.get("calls", 0) + 1
    comm = {"torch": dist, "deepspeed": deepspeed.comm}[config.get("comm", "torch")]
    names = [f"of generation {config['attempt']}, call {calls}", object]
    comm.broadcast_object_list(names, src=0)
    crew.told["name"] = names[0]
    if config.get("asks_rank"):
        crew.told["rank"] = dist.get_rank()
        if calls == 1:
            KEPT.clear()
        KEPT.append(elastic.keep(list, "data"))
        crew.told["kept"] = len(KEPT), len({id(each) for each in KEPT})
    if config.get("counts"):
        count = torch.tensor([1.0, 2.0])
        comm.all_reduce(count)
        crew.told["count"] = count.tolist()
    if config.get("lists"):
        found: list[Any] = [None] * dist.get_world_size()
        comm.all_gather_object(found, "one")
        each = torch.zeros(dist.get_world_size())
        dist.all_gather_into_tensor(each, torch.ones(1))
        crew.told["found"], crew.told["each"] = found, each.tolist()
    if Path(config["url"], "another").exists():
        dist.all_reduce(torch.ones(1))
    if config.get("big"):
        dist.broadcast(torch.ones(1 << 20), src=0)
    crew.point("set up")
    engine, loader = build(config)
    seed = torch.tensor([calls * 100])
    deepspeed.comm.broadcast(seed, src=0)
    crew.told["seed"] = int(seed)
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)


def logs(config: dict[str, Any]) -> None:
    """A mean loss now and then, by a counter of the script's own; with "by_step" by the run's. In each `every` steps it
    is the one of this number (`at`)."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    if config.get("asks_rank"):
        crew.told["rank"] = dist.get_rank()
    engine, loader = build(config)
    every, at = config.get("every", 3), config.get("at", 1)
    count = 0
    for _ in elastic.epochs():
        for batch in loader:
            over = engine.is_gradient_accumulation_boundary()
            loss = one_pass(engine, batch)
            count += over
            if over and (elastic.get_context().step if config.get("by_step") else count) % every == at:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                crew.told["logged"] = crew.told.get("logged", 0) + 1


def has_a_group(config: dict[str, Any]) -> None:
    """Of all ranks, over which it agrees on a name in its set-up and adds up in its loop; with "meshes" a DeviceMesh is
    made of it; with "another" the set-up makes one with another description; "strict": its steps are blocks."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    group = dist.new_group(backend="gloo", group_desc=config.get("another", "metrics"))
    crew.told["size"] = dist.get_world_size(group)
    names = [f"of generation {config['attempt']}"]
    dist.broadcast_object_list(names, src=0, group=group)
    crew.told["name"] = names[0]
    if config.get("meshes"):
        DeviceMesh.from_group(group, "cpu")
    crew.point("set up")
    engine, loader = build(config)
    summed = crew.told["summed"] = {}
    for _ in elastic.epochs():
        for batch in loader:
            now = elastic.get_context()
            over, step = engine.is_gradient_accumulation_boundary(), now.step
            with elastic.step() if config.get("strict") else nullcontext():
                one_pass(engine, batch)
                if over and (step, now.rank, now.resumed) == (config.get("at"), config.get("victim"), False):
                    # The others are in a sum over the group.
                    crew.point("there")
                    crew.stay()
                if over:
                    count = torch.ones(1)
                    dist.all_reduce(count, group=group)
                    ranks = dist.get_process_group_ranks(group)
                    summed[step + 1] = (int(count), dist.get_rank(group), ranks, dist.get_backend(group))

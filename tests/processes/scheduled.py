"""A training function with whatever scripts have in their set-up and in their loop, as its configuration says."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import crew
import pipelined
import staged
import torch
import torch.distributed as dist
from torch import nn
from trainings import Numbers, build

import elastic
from elastic.training import context


def trains(config: dict[str, Any]) -> None:
    has = config["has"]
    group = _sets_up(has)
    data = elastic.keep(Numbers, 6, torch.float32)
    engine, loader = build(config)
    if "seed" in has:
        seed = torch.tensor([7])
        dist.broadcast(seed, src=0, group=group)
    made = 0
    for _ in elastic.epochs() if "epochs" in has else range(2):
        for x, y in loader:
            with elastic.step() if "strict" in has else nullcontext():
                assert engine.module.training
                may_stay(config, "batch")
                loss = nn.functional.mse_loss(engine(x), y)
                may_stay(config, "forward")
                engine.backward(loss)
                may_stay(config, "backward")
                over = engine.is_gradient_accumulation_boundary()
                # The run's step is asked for by those alone that count by it.
                number = elastic.get_context().step + 1 if has.get("logs") == "by step" else made + 1
                engine.step()
                may_stay(config, "step")
                made += over
                if over and "logs" in has and number % 3 == 1:
                    mean = loss.detach().clone()
                    dist.all_reduce(mean, group=group)
                if over and has.get("evaluates") == "within":
                    _evaluate(config, engine, data, group)
        if has.get("evaluates") == "between":
            with elastic.step():
                _evaluate(config, engine, data, group)
            if not elastic.get_context().abandoned:
                crew.told.setdefault("evaluated", []).append(elastic.get_context().step)
        if has.get("evaluates") is True:
            _evaluate(config, engine, data, group)
    crew.told["made"] = made


def trains_in_stages(config: dict[str, Any]) -> None:
    """The same with a pipeline, of either engine."""
    _sets_up(config["has"])
    kind = staged if config.get("engine") == "fsdp2" else pipelined
    engine, loader = kind.build({**config, "watched": partial(may_stay, config)})
    for _ in elastic.epochs():
        for batches in loader:
            with elastic.step() if "strict" in config["has"] else nullcontext():
                may_stay(config, "batch")
                loss = engine.train_batch(batches)
                assert torch.isfinite(loss)
                may_stay(config, "step")
                if "evaluates" in config["has"] and elastic.get_context().step % 3 == 1:
                    engine.eval()
                    may_stay(config, "evaluation")
                    engine.eval_batch(iter([pipelined.content(range(3))] * 2), num_micro_batches=2)
                    engine.train()


def _sets_up(has: dict[str, Any]) -> Any:
    """What there is of it; returns the group that was made, or None."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    rank = _rank(has["asks"])
    if "main first" in has:
        if rank:
            dist.barrier()
        crew.point("what one does for all")
        if not rank:
            dist.barrier()
    group = dist.new_group(backend="gloo") if "group" in has else None
    if "name" in has:
        names = [f"of call {crew.told['calls']}"]
        dist.broadcast_object_list(names, src=0, group=group)
        crew.told["name"] = names[0]
    if "count" in has:
        count = torch.ones(1)
        dist.all_reduce(count)
    if "mesh" in has:
        crew.told["mesh"] = dict(elastic.get_context().mesh)
    return group


def _rank(asks: str) -> int | None:
    import deepspeed

    if asks == "variable":
        return int(os.environ["RANK"])
    if asks == "elastic":
        return elastic.get_context().rank
    if asks == "deepspeed":
        deepspeed.init_distributed()
        return int(deepspeed.comm.get_rank())
    return dist.get_rank() if asks == "torch" else None


def may_stay(config: dict[str, Any], where: str) -> None:
    generation = context.current()
    assert generation is not None
    spec = generation.scope.spec
    if config["kills"].get(spec.generation) == (spec.rank, generation.scope.step, where):
        crew.point("there")
        crew.stay()


def _evaluate(config: dict[str, Any], engine: Any, data: Any, group: Any) -> None:
    engine.eval()
    may_stay(config, "evaluation")
    with torch.no_grad():
        found = torch.stack([engine(data[index][0][None]).sum() for index in range(len(data))]).sum()
    engine.train()
    dist.all_reduce(found, group=group)

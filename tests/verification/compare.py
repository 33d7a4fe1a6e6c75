"""What restored engines hold, by name, against what they should: shares only the inventory with the verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verification.model import DTYPES, KINDS, Setup, steps_done, value
from verification.scene import Place, World, place, require, stage_of


def plain(world: World) -> dict[str, Any]:
    """All that a world's state has next to its tensors, by name."""
    return dict(require(world.run(lambda engine, _: _plain(engine)))[0])


def differences(target: World, version: str, wanted: dict[str, Any], places: Sequence[Place]) -> list[str]:
    """What the target holds otherwise than `version` and its plain values `wanted`; empty when the state is that."""
    setup = target.setup
    found = require(target.run(lambda engine, rank: _differs(engine, setup, version, wanted)))
    found[0] += _elsewhere(places, steps_done(version, 0))
    return [f"rank {rank}: {what}" for rank, own in enumerate(found) for what in own]


def _elsewhere(places: Sequence[Place], step: int) -> list[str]:
    """What a single rank would do next is what all do together."""
    wanted = place(0, 1, None, step)[0]
    passes = sorted(one for own in places for one in own.passes)
    found = [] if tuple(passes) == tuple(sorted(wanted.passes)) else ["samples or seeds of the next step"]
    return found + ["what it would save next" for own in places if own.caller != wanted.caller]


def _differs(engine: Any, setup: Setup, version: str, wanted: dict[str, Any]) -> list[str]:
    numels = {parameter.name: parameter.numel for parameter in setup.parameters}
    stage = stage_of(engine)
    kinds, _ = KINDS[setup.optimizer]
    found = []
    for master in stage.masters():
        state = stage.base.state.get(master.tensor) or {}
        tensors = {"master": master.tensor, **{kind: state.get(kind) for kind in kinds}}
        absent = stage.zero_stage == 0 and any(p.idle and p.name in master.names for p in setup.trained)
        for chunk in master.chunks:
            for kind, tensor in tensors.items():
                whole = value(version, kind, chunk.name, numels[chunk.name], torch.float32)
                if kind != "master" and (absent or tensor is None):
                    if absent != (tensor is None):
                        found.append(f"{kind}/{chunk.name} {'should not be' if absent else 'is not'} there")
                    continue
                part = tensor.detach().reshape(-1)[chunk.offset : chunk.offset + chunk.numel]
                if not torch.equal(part, whole[chunk.start : chunk.stop]):
                    found.append(f"{kind}/{chunk.name}")
    found += _wrong_weights(engine, setup, version)
    plain = _plain(engine)
    found += [f"{key} is {plain.get(key)}, was {wanted[key]}" for key in wanted if plain.get(key) != wanted[key]]
    return found + _not_live(engine, stage)


def _wrong_weights(engine: Any, setup: Setup, version: str) -> list[str]:
    """The tensors that a forward pass would use, by the model's own names."""
    found = []
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    for parameter in setup.parameters:
        whole = value(version, "master", parameter.name, parameter.numel, torch.float32).to(DTYPES[setup.dtype])
        for name in (parameter.name, *parameter.ties):
            if not torch.equal(*_comparable(named[name], whole)):
                found.append(f"weight/{name}")
    buffers = dict(engine.module.named_buffers())
    for buffer in setup.buffers:
        live = buffers[buffer.name]
        if not torch.equal(live.reshape(-1), value(version, "buffer", buffer.name, live.numel(), live.dtype)):
            found.append(f"buffer/{buffer.name}")
    return found


def _comparable(live: Any, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank has of a parameter, and what it should be."""
    if not hasattr(live, "ds_tensor") or live.data.numel() == whole.numel():
        return live.detach().reshape(-1), whole
    start = live.ds_tensor.numel() * _rank(live)
    part = whole[start : start + live.ds_tensor.numel()]
    return live.ds_tensor.detach().reshape(-1)[: part.numel()], part


def _rank(live: Any) -> int:
    from deepspeed import comm

    return int(comm.get_rank())


def _plain(engine: Any) -> dict[str, Any]:
    """All that is no tensor, by name."""
    from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
    from elastic.engines.inventory import Inventory
    from elastic.training.state.extra_state import read_extra

    stage = stage_of(engine)
    extra = read_extra(DeepSpeedAdapter(engine), stage, Inventory.of(stage), {})
    scalars = {name: entry["values"] for entry in extra["optimizer"]["scalars"] for name in entry["names"]}
    groups = {f"group {i}: {k}": v for i, g in enumerate(extra["optimizer"]["groups"]) for k, v in g["hyper"].items()}
    steps = {f"scalars of {name}": values for name, values in scalars.items()}
    counters = {name: number for name, number in extra["engine"].items() if name != "micro_steps"}
    return {**steps, **groups, **counters, "scaler": extra["loss_scaler"], "scheduler": extra["scheduler"]}


def _not_live(engine: Any, stage: Any) -> list[str]:
    """Is a rate written by the scheduler one that the optimizer's step reads? Is one step counted once?"""
    found = []
    for number, group in enumerate(stage.base.param_groups):
        for holder in (engine.optimizer, engine.basic_optimizer, engine.lr_scheduler.optimizer):
            if holder.param_groups[number] is not group:
                found.append(f"group {number} of {type(holder).__name__} is not the live one")
    counts = [state["step"] for state in stage.base.state.values() if isinstance(state.get("step"), torch.Tensor)]
    if len({id(count) for count in counts}) != len(counts):
        found.append("one step count serves two tensors")
    return found

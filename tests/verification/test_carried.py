"""What a snapshot carries to any world size, looked up in the engines: state that has changed, and from which rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from verification import scene
from verification.corpus import BF2, Z0, Z1, Z2, Z3
from verification.model import Setup

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("setup", [Z0, Z1, Z3], ids=str)
def test_hyper_parameters_that_were_changed_in_training_are_carried(setup: Setup) -> None:
    def change(engine: Any, rank: int) -> None:
        for number, group in enumerate(scene.stage_of(engine).base.param_groups):
            group["weight_decay"], group["betas"], group["eps"] = 0.3 + number, (0.5 + number / 10, 0.75), 1e-3

    with scene.world(setup, 2, scene.SAVED) as source, scene.world(setup, 3, scene.FRESH) as target:
        scene.require(source.run(change))
        store, checkpoint = scene.save(source)
        scene.require(scene.restore(target, lambda rank: store, checkpoint))
        for engine in target.engines:
            groups = engine.optimizer.param_groups
            assert [group["weight_decay"] for group in groups] == [0.3, 1.3, 2.3]
            assert [group["betas"] for group in groups] == [(0.5, 0.75), (0.6, 0.75), (0.7, 0.75)]
            assert {group["eps"] for group in groups} == {1e-3}


@pytest.mark.parametrize("setup", [Z0, BF2, Z3], ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "another tensor"])
def test_a_frozen_tensor_that_is_changed_between_two_snapshots_is_carried(setup: Setup, in_place: bool) -> None:
    if setup.stage == 3 and not in_place:
        pytest.skip("stage 3 keeps a frozen parameter in a tensor of its own")
    stores = [CheckpointStore(f"memory://carried-{setup.stage}-{in_place}-{number}", scene.RUN) for number in range(2)]

    def two_shards(engine: Any, rank: int) -> list[Any]:
        state, shards = scene.open_state(engine), []
        for number, store in enumerate(stores):
            caller = scene.place(rank, 2, None, 20 + number)[0].caller
            engine.global_steps = 20 + number
            snapshot = state.snapshot(run_id=scene.RUN, generation=1, step=20 + number, caller=caller)
            shards.append(store.write_shard(snapshot))
            frozen(engine, lambda part: part.mul_(3.0) if in_place else part * 3.0)
        return shards

    with scene.world(setup, 2, scene.SAVED) as source:
        before = whole_frozen(source)
        shards = scene.require(source.run(two_shards))
    for number, store in enumerate(stores):
        manifest = assemble([shards[rank][number] for rank in range(2)], run_id=scene.RUN)
        store.commit(manifest)
        with scene.world(setup, 3, scene.FRESH) as target:
            scene.require(scene.restore(target, lambda rank, store=store: store, manifest.id))  # type: ignore[misc]
            assert torch.equal(whole_frozen(target), before * 3.0**number)


@pytest.mark.parametrize("setup", [Z0, Z2, Z3], ids=str)
def test_module_buffers_are_rank_0s_on_every_rank(setup: Setup) -> None:
    def drift(engine: Any, rank: int) -> torch.Tensor:
        buffer = dict(engine.module.named_buffers())["drift.mean"]
        buffer.add_(10.0 * rank)
        return buffer.clone()

    with scene.world(setup, 3, scene.SAVED) as source, scene.world(setup, 4, scene.FRESH) as target:
        run = scene.require(source.run(drift))[0]
        store, checkpoint = scene.save(source)
        scene.require(scene.restore(target, lambda rank: store, checkpoint))
        for engine in target.engines:
            assert torch.equal(dict(engine.module.named_buffers())["drift.mean"], run)


def frozen(engine: Any, change: Any) -> torch.Tensor:
    """This rank's part of the frozen parameter, changed."""
    parameter = dict(engine.module.named_parameters())["frozen.weight"]
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    part.data = change(part.data)
    return part.detach().clone().reshape(-1)


def whole_frozen(world: scene.World) -> torch.Tensor:
    parts = scene.require(world.run(lambda engine, rank: frozen(engine, lambda part: part)))
    return torch.cat(list(parts))[:13] if world.setup.stage == 3 else parts[0]

"""State that must be equal on all ranks and is not: no snapshot is taken, and rank, step and tensor are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from elastic.core.errors import CollectiveFailed
from elastic.core.generation_spec import GenerationSpec, MemoryPlan
from elastic.training.local import SilentCoordinator
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.state import replicas
from verification import scene
from verification.corpus import BF2, FP16, Z0, Z2, Z3
from verification.model import Setup

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

STEP = 7


class Memory:
    """A node's memory in which every snapshot is complete at once."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self._nbytes = 0

    def open(self, template: Any, nbytes: int, *_: Any) -> None:
        self._nbytes = nbytes

    def segment(self) -> memoryview:
        return memoryview(bytearray(self._nbytes))

    def commit(self, step: int, extra: Mapping[str, Any] | None) -> None:
        self.committed.append(step)

    def complete(self) -> int:
        return self.committed[-1] if self.committed else -1

    def wait_complete(self, step: int, timeout_s: float) -> bool:
        return step in self.committed

    def moved(self) -> str | None:
        return None

    def failed(self) -> str | None:
        return None

    def settled(self, step: int) -> None: ...


class Coordinator(SilentCoordinator):
    def __init__(self, memory: Memory | None) -> None:
        self.saved: list[int] = []
        self._memory = memory

    def memory(self) -> Any:
        return self._memory

    def save(self, snapshot: Any) -> None:
        self.saved.append(snapshot.step)


def take(engine: Any, rank: int, world_size: int, drift: Callable[[Any], None] | None, memory: bool) -> list[int]:
    """The steps of which this rank has snapshots: one of `STEP`, and one of the next step after rank 1 has drifted."""
    coordinator = Coordinator(Memory() if memory else None)
    plan = MemoryPlan(every_steps=1) if memory else None
    spec = GenerationSpec("run", 1, rank, world_size, memory=plan, checkpoint_every_steps=None if memory else 1)
    scope = GenerationScope(spec, coordinator, torch.device("cpu"))
    snapshots = Snapshots(scope, scene.open_state(engine), dict)
    try:
        for step in (STEP, STEP + 1):
            scope.step = step
            snapshots.prepare(0.1, True)
            snapshots.start()
            snapshots.drain()
            engine.global_steps += 1
            if drift is not None and rank == 1:
                drift(engine)
    finally:
        snapshots.close()
    return coordinator.saved + (coordinator.memory().committed if memory else [])


def weights(name: str) -> Callable[[Any], None]:
    def change(engine: Any) -> None:
        dict(engine.module.named_parameters())[name].data.mul_(1.5)

    return change


def rate(engine: Any) -> None:
    scene.stage_of(engine).base.param_groups[1]["lr"] *= 2


def adam_step(engine: Any) -> None:
    stage = scene.stage_of(engine)
    stage.base.state[stage.masters()[0].tensor]["step"] += 1


def moment(engine: Any) -> None:
    stage = scene.stage_of(engine)
    stage.base.state[stage.masters()[1].tensor]["exp_avg_sq"].add_(1.0)


def scale(engine: Any) -> None:
    from elastic.engines.deepspeed.extra_state import scaler_of

    scaler_of(engine).cur_scale *= 2


def scheduler(engine: Any) -> None:
    engine.lr_scheduler.last_epoch += 1


def skipped(engine: Any) -> None:
    engine.skipped_steps += 1


def test_numbers_are_read_with_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        transfers.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    values = [torch.tensor(float(number)) for number in range(500)]
    assert replicas.numbers([*values, None, 0.5]) == [*map(float, range(500)), None, 0.5]
    assert transfers == [500]


CASES = [
    pytest.param(Z0, weights("embedding.weight"), "master/embedding.weight", id="tied tensor, stage 0"),
    pytest.param(Z2, weights("embedding.weight"), "weights of embedding.weight", id="tied tensor, stage 2"),
    pytest.param(BF2, weights("frozen.weight"), "param/frozen.weight", id="frozen tensor"),
    pytest.param(Z0, moment, "exp_avg_sq/layers.2.weight", id="moment"),
    pytest.param(Z2, rate, "hyper-parameters of group 1", id="lr"),
    pytest.param(Z0, adam_step, "optimizer scalars of embedding.weight", id="Adam step, stage 0"),
    pytest.param(Z3, adam_step, "optimizer scalars of sub0", id="Adam step, stage 3"),
    pytest.param(FP16, scale, "loss scaler", id="loss scale"),
    pytest.param(Z2, scheduler, "learning-rate scheduler", id="scheduler"),
    pytest.param(Z3, skipped, "counters", id="counters"),
]


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "storage"])
@pytest.mark.parametrize(("setup", "drift", "named"), CASES)
def test_what_has_drifted_on_one_rank_is_in_no_snapshot(
    setup: Setup, drift: Callable[[Any], None], named: str, memory: bool
) -> None:
    with scene.world(setup, 3, scene.SAVED) as world:
        for healthy in world.run(lambda engine, rank: take(engine, rank, 3, None, memory)):
            assert healthy == [STEP, STEP + 1]
        for result in world.run(lambda engine, rank: take(engine, rank, 3, drift, memory)):
            assert isinstance(result, CollectiveFailed), f"{result}: the snapshot was taken"
            assert f"{named} on rank 1 " in str(result)
            assert f"step {STEP + 1}" in str(result)


def test_module_buffers_may_differ() -> None:
    def own(engine: Any) -> None:
        dict(engine.module.named_buffers())["drift.mean"].add_(1.0)

    with scene.world(Z2, 3, scene.SAVED) as world:
        for taken in world.run(lambda engine, rank: take(engine, rank, 3, own, True)):
            assert taken == [STEP, STEP + 1]

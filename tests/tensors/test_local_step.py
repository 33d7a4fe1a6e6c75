"""An optimizer's step on shards is bit for bit its step on DTensors. Under torch's fake process group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.engines.fsdp2.update import local_step
from elastic.engines.fsdp2.update.stand_ins import local_of

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "of another kind": lambda p: torch.optim.NAdam(p, lr=0.1),
}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    # The last of three ranks: of five rows it has one, of two none.
    dist.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


def _made(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, 7))
    model[2].weight.requires_grad_(False)
    fully_shard(model)
    slow, fast = list(model[0].parameters()), [p for p in model[1:].parameters() if p.requires_grad]
    return model, make([{"params": slow, "lr": 0.01}, {"params": fast}])


def _with_gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        # One of them has no gradient in some steps.
        if parameter.requires_grad and (number, step) != (1, 2):
            assert isinstance(parameter, DTensor)
            local = torch.rand(local_of(parameter).shape, generator=torch.Generator().manual_seed(10 * step + number))
            parameter.grad = DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {name: local_of(parameter).clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = local_of(value).clone() if isinstance(value, torch.Tensor) else value
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_that_on_dtensors(name: str) -> None:
    found = []
    for step in (local_step.step, lambda optimizer: optimizer.step()):
        model, optimizer = _made(OPTIMIZERS[name])
        told, params = [], [list(group["params"]) for group in optimizer.param_groups]
        for number in range(4):
            model.zero_grad()
            _with_gradients(model, number)
            step(optimizer)
            told.append(_numbers(model, optimizer))
        assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
            [id(p) for p in own] for own in params
        ]
        found.append(told)
    assert found[0][0].keys() == found[1][0].keys()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def _seen(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The types of gradients that the optimizer's next step has, and what follows it."""
    kinds: list[type] = []

    def step(*_: Any) -> None:
        kinds.extend(type(p.grad) for group in optimizer.param_groups for p in group["params"])

    monkeypatch.setattr(optimizer, "step", step)
    local_step.step(optimizer)
    return kinds


def test_shards_are_stepped_once_there_is_state_and_unless_there_are_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _made(OPTIMIZERS["adamw"])
    _with_gradients(model, 0)
    with monkeypatch.context() as patched:
        assert set(_seen(optimizer, patched)) == {DTensor}, "its first step makes its state"
    optimizer.step()
    with monkeypatch.context() as patched:
        assert set(_seen(optimizer, patched)) == {torch.Tensor}
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with monkeypatch.context() as patched:
        assert set(_seen(optimizer, patched)) == {DTensor}
    hook.remove()
    other = _made(OPTIMIZERS["of another kind"])[1]
    other.param_groups, other.state = optimizer.param_groups, optimizer.state
    with monkeypatch.context() as patched:
        assert set(_seen(other, patched)) == {DTensor}


def test_a_step_that_fails_leaves_everything_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _made(OPTIMIZERS["adamw"])
    _with_gradients(model, 0)
    optimizer.step()
    before, state = copy.copy(optimizer.param_groups[0]["params"]), optimizer.state
    monkeypatch.setattr(optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        local_step.step(optimizer)
    assert optimizer.state is state
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], before, strict=True))

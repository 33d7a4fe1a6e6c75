"""Objects whose state is kept: read, carried as JSON and tensors, and given back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.training.user.objects import ObjectState, install, read
from elastic.training.user.state import State, objects_from_json, objects_to_json, tensors_of

CPU = torch.device("cpu")


class Average:
    """An average of weights as people write it: tensors, a count and a numpy value in one dict."""

    def __init__(self) -> None:
        self.shadow = {"weight": torch.zeros(3, 2), "empty": torch.zeros(0)}
        self.updates, self.decay = np.int64(0), np.float32(0.5)

    def update(self) -> None:
        self.shadow["weight"] += torch.arange(6.0).reshape(3, 2) * float(self.decay)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates, "history": (1, float("inf"), {3: "three"})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["history"] == (1, float("inf"), {3: "three"})
        self.shadow, self.updates = state["shadow"], state["updates"]


def carried(saved: dict[str, ObjectState]) -> dict[str, ObjectState]:
    """Through a checkpoint: JSON text, and flat tensors that have elements."""
    text = json.dumps(objects_to_json(saved), allow_nan=False)
    tensors = {name: tensor.reshape(-1).clone() for name, tensor in tensors_of(saved).items() if tensor.numel()}
    return objects_from_json(json.loads(text), tensors)


def test_tensors_and_values_come_back() -> None:
    ema, other = Average(), Average()
    ema.update()
    ema.update()
    saved = carried({"ema": read("ema", ema)})["ema"]
    install("ema", other, saved, CPU)
    assert torch.equal(other.shadow["weight"], ema.shadow["weight"])
    assert other.shadow["empty"].shape == (0,)
    assert other.updates == 2
    ema.update()
    other.update()
    assert torch.equal(other.shadow["weight"], ema.shadow["weight"])
    # The same state again: what the object was given before was its own.
    install("ema", other, saved, CPU)
    assert other.shadow["weight"].sum() == 15.0


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: np.random.default_rng(3), lambda g: g.random(2).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.normal(size=3).tolist()),
        (lambda: np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
        (lambda: random.Random(3), lambda g: [g.gauss(0, 1), g.random()]),
    ],
)
def test_generators_go_on_where_they_were(make: Callable[[], Any], draw: Callable[[Any], list[float]]) -> None:
    generator, other = make(), make()
    draw(generator)
    install("rng", other, carried({"rng": read("rng", generator)})["rng"], CPU)
    assert [draw(generator) for _ in range(3)] == [draw(other) for _ in range(3)]


def test_modules_optimizers_and_schedulers_come_back() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return module, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [3])

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        module(torch.arange(8.0).reshape(2, 4)).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()

    ours, theirs = made(), made()
    for _ in range(4):
        step(*ours)
    names = ("module", "optimizer", "scheduler")
    saved = carried({name: read(name, target) for name, target in zip(names, ours, strict=True)})
    for name, target in zip(names, theirs, strict=True):
        install(name, target, saved[name], CPU)
    step(*ours)
    step(*theirs)
    assert ours[2].get_last_lr() == theirs[2].get_last_lr()
    for mine, other in zip(ours[0].state_dict().values(), theirs[0].state_dict().values(), strict=True):
        assert torch.equal(mine, other)


class Holds:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["inner"][0]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (object(), r"a object has no state_dict\(\) and load_state_dict\(\)"),
        (Average, "a type has no state_dict"),
        (random.SystemRandom(), "a SystemRandom has no state_dict"),
        (Holds(lambda: None), r"'x'\.inner\[0\] is a function"),
        (Holds({1, 2}), r"'x'\.inner\[0\] is a set"),
        (Holds(np.array([None])), "array of Python objects"),
        (Holds(torch.eye(2).to_sparse()), "use a dense tensor"),
        (Holds(torch.zeros(2, dtype=torch.complex128)), "dtype torch.complex128"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(target: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        State().register(x=target)


def test_another_object_under_the_name_is_refused() -> None:
    state = State()
    state.register(a=Holds(1))
    with pytest.raises(UsageError, match="a Holds is registered under this name already"):
        state.register(a=Holds(2))
    with pytest.raises(UsageError, match="the state of a Holds under 'a', and a Average is registered now"):
        install("a", Average(), read("a", Holds(1)), CPU)
    with pytest.raises(UsageError, match=r"'a' \(Average\) does not take its state from the checkpoint"):
        install("a", Average(), ObjectState("Average", {"history": []}, ()), CPU)


def test_objects_may_be_registered_before_the_restore_or_after_it() -> None:
    before, after = Holds(0), Holds(0)
    state = State()
    state.register(before=before)
    state.load_objects(carried({"before": read("before", Holds(1)), "after": read("after", Holds(2))}), CPU)
    assert before.value == 1
    with pytest.raises(UsageError, match=r"has the state of 'after' \(Holds\), which .* not registered"):
        state.require_claimed()
    state.register(after=after)
    assert after.value == 2
    state.require_claimed()
    state.load_objects(carried({"gone": read("gone", Holds(3))}), CPU)
    state.register(gone=None)
    state.require_claimed()
    assert list(state.objects) == ["before", "after"]

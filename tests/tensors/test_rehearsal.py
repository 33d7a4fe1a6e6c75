"""A pass that is made ahead of joining leaves the model as it was, whatever the model does in it."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elastic
from elastic.engines.model.precision import Precision, floating
from elastic.training import context
from elastic.training.in_loop.passes import arguments_of, describe, precision_of
from elastic.training.in_loop.rehearsal import Rehearsal, make_pass


class Hostile(nn.Module):
    """Keeps whatever a module may keep of a pass."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.head = nn.Linear(4, 4)
        self.register_buffer("places", torch.arange(3.0).expand(2, 3))
        self.register_buffer("mean", None)
        self.fails = fails
        self.calls, self.seen = 0, set[torch.dtype]()
        self.losses: list[Any] = []
        self.cache: torch.Tensor | None = None
        self.trained_in: list[bool] = []

    def forward(self, tokens: torch.Tensor, *, factor: float, more: Any) -> dict[str, Any]:
        self.calls += 1
        self.seen.add(self.table.weight.dtype)
        self.trained_in.append(self.training)
        self.late = random.random() + float(np.random.rand())
        if self.cache is None:
            self.cache = torch.rand(4)
        self.mean = self.cache.mean()
        found = self.frozen(self.norm(self.table(tokens) + more[0]["bias"].to(self.norm.weight.dtype)))
        self.losses.append(found.sum())
        if self.fails:
            raise ValueError("not with these")
        out = nn.functional.dropout(self.head(found.to(self.head.weight.dtype)), 0.5, self.training)
        return {"loss": out.mean() * factor, "kept": (out, None, "words")}


_WHOLE = [name for name in floating(Hostile()) if not name.startswith(("table", "head"))]


def _pass(precision: Precision) -> Any:
    """In which `frozen` is not in training."""
    arguments = {"factor": 2.0, "more": [{"bias": torch.ones(2, 4).t().contiguous().t()}, (None, True, "text")]}
    described = describe([torch.full((2,), 4)], arguments, precision, Hostile(), "cpu")
    # As it comes from another process.
    return json.loads(json.dumps(described))


def _everything(model: nn.Module) -> dict[str, Any]:
    kept = {
        name: (dict(vars(module)), [copy.copy(v) for v in vars(module).values() if type(v) in (list, set, dict)])
        for name, module in model.named_modules()
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: (id(tensor), tensor.dtype, tensor.data_ptr(), tensor.grad) for name, tensor in tensors.items()}
    return {"attributes": kept, "tensors": values, "random": (random.getstate(), torch.get_rng_state().tolist())}


@pytest.mark.parametrize(
    "precision",
    [
        Precision(torch.float32),
        Precision(torch.float32, autocast=torch.bfloat16),
        Precision(torch.bfloat16, dict.fromkeys(_WHOLE, torch.float32)),
    ],
    ids=["fp32", "autocast", "bf16"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_leaves_nothing(precision: Precision, fails: bool) -> None:
    torch.manual_seed(1)
    model = Hostile(fails)
    model.head.weight.grad = torch.full((4, 4), 3.0)
    weights = copy.deepcopy(model.state_dict())
    numbers = np.random.get_state()[1].tolist()
    seen = model.seen
    described = _pass(precision)
    assert precision_of(described) == precision
    watched: list[torch.dtype] = []
    modes: list[tuple[bool, bool]] = []
    model.table.register_forward_pre_hook(lambda module, _: watched.append(module.weight.dtype))
    model.table.register_forward_pre_hook(lambda module, _: modes.append((module.training, model.frozen.training)))
    model.eval()
    before = _everything(model)
    if fails:
        with pytest.raises(ValueError, match="not with these"):
            make_pass(model, described)
    else:
        make_pass(model, described)
    assert watched == [precision.weights] * (1 if fails else 2)
    assert set(modes) == {(True, False)}
    assert (model.calls, model.seen, model.losses, model.cache) == (0, set(), [], None)
    assert model.seen is seen
    assert _everything(model) == before
    assert np.random.get_state()[1].tolist() == numbers
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_arguments_come_as_they_were() -> None:
    """In shape, strides, type and nesting."""
    inputs, named = arguments_of(_pass(Precision(torch.float32)))
    assert [(value.shape, value.dtype) for value in inputs] == [((2,), torch.int64)]
    assert named["factor"] == 2.0
    bias = named["more"][0]["bias"]
    assert (bias.shape, bias.stride(), bias.requires_grad) == ((2, 4), (1, 2), False)
    assert named["more"][1] == (None, True, "text")


@dataclass
class Batch:
    tokens: torch.Tensor


def test_arguments_of_a_class_are_not_described() -> None:
    with pytest.raises(TypeError, match="Batch"):
        describe([Batch(torch.ones(1))], {}, Precision(torch.float32), nn.Identity(), "cpu")


def test_what_came_of_it_is_told() -> None:
    told: list[str] = []
    passes: list[Any] = []
    rehearsal = Rehearsal(Hostile(), lambda: passes, told.append)
    rehearsal()
    assert not rehearsal.over
    assert told == []
    passes.append(_pass(Precision(torch.float32)))
    rehearsal()
    rehearsal()
    assert rehearsal.over
    assert len(told) == 1
    assert told[0].startswith("made 1 forward and backward pass of zeros ahead of joining, in ")
    failing = Rehearsal(Hostile(fails=True), lambda: passes, told.append)
    failing()
    assert told[1] == "could not make a pass ahead of joining (ValueError: not with these): its first step does"


class AsksForItsStep(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + elastic.get_context().step


def test_a_model_that_asks_for_its_generation_begins_none() -> None:
    told: list[str] = []
    described = describe([torch.ones(1, 2)], {}, Precision(torch.float32), nn.Identity(), "cpu")
    Rehearsal(AsksForItsStep(2, 2), lambda: [described], told.append)()
    assert context.current() is None
    assert "UsageError: the model asks for its generation, which has not begun" in told[0]


@pytest.mark.parametrize("model", [None, nn.LazyLinear(2), nn.Linear(2, 2, device="meta"), object()])
def test_weights_that_are_not_here_are_not_rehearsed(model: Any) -> None:
    asked: list[int] = []
    Rehearsal(model, lambda: asked, lambda _: None)()
    assert Rehearsal(model, list, lambda _: None).over

"""What DeepSpeed makes in the places of a model's layers is taken out again, and comes back as the same objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.layers.replaced import Replaced
from elastic.engines.model.placeholders import is_placeholder, placeholder, renew_accumulator


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 1000
        self.calls = 1000
        self.project = nn.Linear(6, 4)
        self.block = nn.Sequential(nn.Linear(4, 4))
        # Nothing is in it.
        self.drop = nn.Identity()


class Sliced(nn.Module):
    """As AutoTP's layers: with the parameters of the one that was there."""

    def __init__(self, layer: nn.Linear, group: object) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.weight.data = self.weight.data[:2].clone()
        self.weight.gather_params = self.gather  # type: ignore[attr-defined]
        self.group = group

    def gather(self) -> None: ...


class Experts(nn.Module):
    """As AutoEP's: with parameters and a router of its own."""

    def __init__(self, group: object) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.packed = nn.Parameter(torch.ones(2, 4, 4))
        self.packed.allreduce = False  # type: ignore[attr-defined]
        self.group = group


class Build:
    """One engine after another, built on a model; what is not kept is `discarded`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Heads()
        self.sliced = True
        self.sources: dict[int, Any] = {}
        monkeypatch.setattr(DeepSpeedEngine, "_apply_autotp_partitioning", self._replace)

    def __call__(self) -> Replaced:
        found = Replaced(self.model)
        with found.keeping_objects():
            engine: Any = SimpleNamespace(autotp_size=lambda: 1)
            DeepSpeedEngine._apply_autotp_partitioning(engine, self.model)
        found.require_kept()
        found.built()
        return found

    def _replace(self, engine: Any, model: Any) -> Any:
        if self.sliced:
            model.project = Sliced(model.project, object())
            model.block = Experts(object())
            model.heads = 500
        self.sources = {id(model.block.packed): ["source"]} if self.sliced else {}
        return SimpleNamespace(sources=self.sources)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    return Build(monkeypatch)


def test_the_layers_and_numbers_of_before_come_back(build: Build) -> None:
    model, own, weight = build.model, build.model.project, build.model.project.weight
    whole = model.block[0].weight
    replaced = build()
    assert is_placeholder(whole), "whole experts take no memory"
    model.calls = 2000
    model.eval()
    assert replaced.obstacle() is None
    replaced.give_back()
    assert model.project is own
    assert model.project.weight is weight
    assert (model.heads, model.calls) == (1000, 2000), "what was changed since is the script's"
    assert not model.project.training


def test_what_a_loop_holds_is_what_the_next_engine_has(build: Build) -> None:
    replaced, model = build(), build.model
    project, block, router, packed = model.project, model.block, model.block.router, model.block.packed
    seen: list[str] = []
    router.register_forward_hook(lambda *_: seen.append("router"))
    block.scale, packed.mark, first = 3.0, "mine", block.group
    replaced.give_back()
    assert not hasattr(block, "group"), "nothing of an ended generation is kept"
    assert packed.numel() == 0
    assert "allreduce" not in vars(packed)
    for _ in range(2):
        replaced = build()
        assert (model.project, model.block, model.block.router, model.block.packed) == (project, block, router, packed)
        assert (block.scale, packed.mark, packed.allreduce, packed.shape) == (3.0, "mine", False, (2, 4, 4))
        assert block.group is not first
        assert build.sources == {id(packed): ["source"]}, "an optimizer finds it by what it was made of"
        router(torch.ones(4))
        assert seen.pop() == "router"
        assert not seen
        replaced.give_back()


def test_what_transformers_collects_by_is_put_on_anew(build: Build) -> None:
    """It would collect twice."""

    def output_capturing_hook(*_: Any) -> None: ...

    replaced, router = build(), build.model.block.router
    router.register_forward_hook(output_capturing_hook)  # type: ignore[union-attr, arg-type]
    replaced.give_back()
    assert not router._forward_hooks  # type: ignore[union-attr]


def test_a_hook_on_what_the_next_engine_has_not_is_named(build: Build) -> None:
    replaced = build()
    replaced.give_back()
    build.sliced = False
    replaced = build()
    replaced.give_back()
    build.sliced = True
    replaced = build()
    build.model.project.register_forward_hook(lambda *_: None)
    replaced.give_back()
    build.sliced = False
    with pytest.raises(
        UsageError, match="hooks or attributes were put on a Sliced, which DeepSpeed had made in the place"
    ):
        build()


def test_another_layer_of_the_scripts_is_named(build: Build) -> None:
    replaced = build()
    build.model.project = nn.Linear(6, 4)
    assert replaced.obstacle() == "the model has another 'project' than the one that DeepSpeed has made for it"


def test_a_part_of_the_scripts_in_a_layer_of_deepspeeds_is_named(build: Build) -> None:
    replaced = build()
    build.model.block.router.watch = nn.Identity()  # type: ignore[union-attr]
    assert replaced.obstacle() == "the model has other parts in 'block' than those that DeepSpeed has made for it"


def test_a_parameter_of_another_shape_gets_gradients_of_that_shape_while_an_old_loss_is_held() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    held = (parameter.t() @ torch.ones(3)).sum()
    parameter.data = placeholder(parameter, (5, 2))
    assert is_placeholder(parameter)
    assert not is_placeholder(torch.ones(()).expand(1))
    parameter.data = torch.ones(5, 2)
    renew_accumulator(parameter)
    (parameter.t() @ torch.ones(5)).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.shape == (5, 2)
    assert held.item() == 6.0

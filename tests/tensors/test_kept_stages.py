"""A pipeline's model that is cut, given back and cut again for other stages, under torch's fake process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic import Pipeline
from elastic.core.mesh import Mesh
from elastic.engines.base import ResolvedConfig, UserObjects
from elastic.engines.fsdp2.belongings import is_released
from elastic.engines.fsdp2.config import Options
from elastic.engines.fsdp2.kind import _MESH, KIND
from elastic.engines.fsdp2.pipeline import sharding
from elastic.engines.fsdp2.pipeline.layers import Absent, layer_of
from elastic.engines.model.plain_names import modules_everywhere

CPU = torch.device("cpu")
SCHEDULE = {"pipeline_schedule": "1F1B", "pipeline_stages_per_rank": 1}
NAMES = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")
# Rank and size, and the layers of the rank's stage: in all places of pipelines of two and of three, and alone.
TURNS = ((0, 2, 2, "012"), (1, 2, 2, "345"), (1, 3, 3, "23"), (0, 1, 1, "012345"), (2, 3, 3, "45"), (3, 4, 2, "345"))


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def built(model: nn.Module, optimizer: Any, size: int, pp: int, begins: bool) -> Any:
    native = {**vars(Options()), **SCHEDULE, "shard": ("Sequential",), _MESH: Mesh(size, pp=pp)}
    objects = UserObjects(model, optimizer, pipeline=Pipeline(nn.functional.mse_loss, layers=NAMES))
    engine, *_ = KIND.build(ResolvedConfig(native, 8, 4, 1, begins), None, CPU, objects)
    assert engine.obstacle() is None
    return engine


def of(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, nn.Module], list[set[str]]]:
    layers = {name: layer_of(model, name) for name in NAMES}
    decays = {name for name, p in model.named_parameters() if p.dim() > 1}
    groups = [decays, {name for name, _ in model.named_parameters()} - decays]
    named = dict(model.named_parameters())
    given = [{"params": [named[name] for name in sorted(group)]} for group in groups]
    optimizer = torch.optim.AdamW([given[0], {**given[1], "lr": 0.3}])
    return model, optimizer, layers, groups


def test_layers_that_come_back_are_the_same_objects(as_rank: Any) -> None:
    model, optimizer, layers, groups = of(Row())
    layers["layers.3"].register_forward_hook(lambda *_: None)
    layers["layers.3"].of_the_script = "kept"
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sharded: dict[str, Any] = {}
    for rank, size, pp, own in TURNS:
        as_rank(rank, size)
        engine = built(model, optimizer, size, pp, begins=not sharded)
        here = {NAMES[int(number)] for number in own}
        for name, layer in layers.items():
            assert (layer_of(model, name) is layer) == (name in here)
            assert isinstance(layer_of(model, name), Absent) == (name not in here)
            assert name in here or all(p.is_meta for p in layer.parameters()), "what is elsewhere takes no memory"
        named = dict(model.named_parameters())
        assert all(sharded.setdefault(name, p) is p for name, p in named.items())
        held = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
        assert held == [{id(named[name]) for name in whole if name in named} for whole in groups]
        assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.3]
        for training in (False, True):
            model.train(training)
            assert all(module.training is training for layer in layers.values() for module in layer.modules())
        everywhere = {id(module) for module in modules_everywhere(model)}
        assert all(id(module) in everywhere for layer in layers.values() for module in layer.modules())
        engine.detach()
        assert is_released(model)
        assert all(p.is_meta for p in model.parameters())
    as_rank(0, 1)
    engine = built(model, optimizer, 1, 1, begins=False)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert all(layer_of(model, name) is layer for name, layer in layers.items())
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    engine.detach()
    assert (len(layers["layers.3"]._forward_hooks), layers["layers.3"].of_the_script) == (1, "kept")


def test_a_model_whose_cut_has_failed_can_be_cut_again(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another peer is lost while groups are made: before the model is sharded, and after it."""
    model, optimizer, layers, _ = of(Row())
    as_rank(0, 2)
    engine = built(model, optimizer, 2, 2, begins=True)
    first = model.get_parameter("embed.weight")
    engine.detach()

    def lost(*_: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    for call in ("groups_of_tied", "make_meshes"):
        as_rank(1, 2)
        with monkeypatch.context() as patched:
            patched.setattr(sharding, call, lost)
            with pytest.raises(RuntimeError, match="closed by peer"):
                built(model, optimizer, 2, 2, begins=False)
        assert is_released(model)
    engine = built(model, optimizer, 2, 2, begins=False)
    assert model.get_parameter("head.weight") is first
    assert all((layer_of(model, name) is layer) == (name in NAMES[3:]) for name, layer in layers.items())
    engine.detach()

"""A model that is sharded, given back and sharded again as another rank, under torch's fake process group."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from elastic.core.errors import UsageError
from elastic.engines.base import ResolvedConfig, UserObjects
from elastic.engines.fsdp2.belongings import Belongings, is_released
from elastic.engines.fsdp2.config import Options
from elastic.engines.fsdp2.kind import KIND
from elastic.engines.fsdp2.sharding import repoint, shard_model
from elastic.engines.fsdp2.state import Fsdp2State

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {**vars(Options()), "shard": ("Linear",)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4, bias=False))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].weight.requires_grad_(False)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))) * self.seen


def marks(model: nn.Module) -> dict[str, Any]:
    """What is on the modules besides parameters' values."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks") and value is not None}
        found[name] = (type(module), hooks, sorted(vars(module)), list(module._parameters))
    return found


def built(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Belongings, Any]:
    before = {id(tensor): name for name, tensor in model.named_parameters()}
    mesh = shard_model(model, OPTIONS, CPU, begins=not is_released(model))
    repoint(optimizer, before, dict(model.named_parameters()))
    return Belongings(model, optimizer), mesh


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    # Hooks of state dicts are registered with the first pass.
    loss: torch.Tensor = model(torch.tensor([1, 2, 3])).sum()
    loss.backward()
    optimizer.step()
    model.state_dict()
    return loss


def test_modules_and_sharded_parameters_stay_the_same_objects(as_rank: Any) -> None:
    as_rank(0, 3)
    model = Tied()
    model.layers[0].register_forward_hook(lambda *_: None)
    before, shapes = marks(model), {name: tensor.shape for name, tensor in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    belongings, mesh = built(model, optimizer)
    first = dict(model.named_parameters())
    loops = [trained(model, optimizer)]
    optimizer.param_groups[0]["lr"] = 0.5
    meshes = [weakref.ref(mesh.dp)]

    for rank, size in ((1, 2), (3, 4), (0, 1)):
        belongings.give_back()
        del mesh
        assert marks(model) == before
        assert not any(module in _module_state_mapping for module in model.modules())
        assert {name: tensor.shape for name, tensor in model.named_parameters()} == shapes
        assert all(tensor.is_meta for tensor in model.parameters()), "nothing of the model takes memory meanwhile"
        assert optimizer.param_groups[0]["lr"] == 0.1
        as_rank(rank, size)
        gc.collect()
        assert meshes[-1]() is None, "a mesh holds its process group"

        model.layers[0].extra = rank  # The user's, while the model is sharded or not.
        before = marks(model)
        belongings, mesh = built(model, optimizer)
        meshes.append(weakref.ref(mesh.dp))
        again = dict(model.named_parameters())
        assert all(tensor is first[name] for name, tensor in again.items())
        assert again.keys() == first.keys()
        assert [id(tensor) for tensor in optimizer.param_groups[0]["params"]] == [id(x) for x in again.values()]
        assert model.head.weight is model.embedding.weight
        assert not model.layers[1].weight.requires_grad
        assert isinstance(model.layers[0], FSDPModule)
        rows = -(-11 // size)
        held: Any = model.embedding.weight
        assert isinstance(held, DTensor)
        assert held.device_mesh is mesh.dp
        assert held.to_local().shape == (max(0, min(11, (rank + 1) * rows) - rank * rows), 4)
        state = Fsdp2State(model, optimizer, None, mesh)
        chunks = {chunk.name: chunk for master in state.masters() for chunk in master.chunks}
        assert chunks["embedding.weight"].start == 4 * rank * rows
        loops.append(trained(model, optimizer))
        assert held.grad is not None
        assert len(optimizer.state) == 3


def test_parameters_that_were_given_stand_for_the_sharded_ones_in_every_generation(as_rank: Any) -> None:
    model = Tied()
    given = [{"params": list(model.layers.parameters()), "lr": 0.3}, {"params": [model.head.weight]}]
    native = {**OPTIONS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for rank, size, begins in ((0, 2, True), (2, 3, False)):
        as_rank(rank, size)
        resolved = ResolvedConfig(native, 8, 4, 1, begins)
        engine, optimizer, _ = KIND.build(resolved, None, CPU, UserObjects(model, model_parameters=given))
        held = [list(model.layers.parameters()), [model.head.weight]]
        assert [[id(x) for x in group["params"]] for group in optimizer.param_groups] == [
            [id(x) for x in tensors] for tensors in held
        ]
        assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1]
        assert not any(tensor.numel() for group in given for tensor in group["params"]), "no whole model is kept"
        assert engine.obstacle() is None
        engine.detach()


def test_a_sharding_of_the_users_own_cannot_be_done_again(as_rank: Any) -> None:
    as_rank(0, 2)
    model = Tied()
    fully_shard(model)
    engine, *_ = KIND.build(
        ResolvedConfig(OPTIONS, 8, 4, 1),
        None,
        CPU,
        UserObjects(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    )
    assert "the script has called fully_shard itself" in str(engine.obstacle())
    engine.close()


def test_a_loss_that_calls_backward_itself_is_refused_by_name(as_rank: Any) -> None:
    """A part of the gradient would not be scaled by the number of micro-batches."""
    as_rank(0, 2)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, _ = KIND.build(ResolvedConfig(OPTIONS, 8, 2, 2, True), None, CPU, UserObjects(model, optimizer))
    given = torch.tensor([1, 2, 3])
    hidden = engine.forward([given], {}, False)
    model.head(model.layers(torch.ones(3, 4))).sum().backward()
    with pytest.raises(UsageError, match=r"'embedding\.weight' has a gradient before engine\.backward.*Chunked"):
        engine.backward(hidden.sum(), {})
    engine.detach()

"""What is sharded together, which rows a rank holds, and what is refused before anything is sharded.

Worlds of up to 1,024 ranks under torch's fake process group: layouts need no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.core.errors import UsageError
from elastic.core.mesh import MeshSettings
from elastic.core.sharding.mesh_memory import state_bytes
from elastic.engines.fsdp2.belongings import parameter_groups
from elastic.engines.fsdp2.config import Options
from elastic.engines.fsdp2.sharding import repoint, shard_model, units
from elastic.engines.fsdp2.state import Fsdp2State
from elastic.engines.inventory import Inventory
from elastic.training.watch.held_state import held_state

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = vars(Options())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(self.up(inputs)))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.fixture
def world() -> Iterator[Any]:
    def begin(rank: int, size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def test_elements_of_module_lists_are_sharded_each_by_itself_and_inner_modules_first() -> None:
    model = Model()
    assert units(model, None) == list(reversed(model.layers))
    assert units(model, ("Block", "Linear"))[-1] is model.layers[0]
    assert units(model, ()) == []
    model._no_split_modules = ["Linear"]
    assert all(isinstance(module, nn.Linear) for module in units(model, None))
    with pytest.raises(UsageError, match=r"shard names \['Missing'\]"):
        units(model, ("Block", "Missing"))


def test_elements_of_numbered_module_dicts_are_too() -> None:
    model: Any = Model()
    layers, model.named = list(model.layers), nn.ModuleDict({"head": Block()})
    model.layers = nn.ModuleDict({str(place): layer for place, layer in enumerate(layers)})
    assert units(model, None) == list(reversed(layers))


def test_a_module_that_shares_a_parameter_with_another_stays_with_the_root() -> None:
    model = Model(tied=True)
    assert units(model, ("Embedding", "Linear")) == [
        layer for block in reversed(model.layers) for layer in (block.down, block.up)
    ]
    model.layers[1].up.weight = model.layers[2].up.weight
    assert units(model, ("Block",)) == [model.layers[0]]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 3), (2, 3), (3, 4), (7, 8), (1_023, 1_024)])
def test_a_rank_holds_the_rows_that_torch_gives_it(world: Any, rank: int, size: int) -> None:
    world(rank, size)
    model = Model(tied=True)
    # Each element is its own index, so that the content of a shard says where it is from.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape))
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    mesh = shard_model(model, OPTIONS, CPU)
    repoint(optimizer, before, dict(model.named_parameters()))
    assert optimizer.param_groups[0] is group
    state = Fsdp2State(model, optimizer, None, mesh)
    assert [spec.name for spec in state.specs()] == list(before.values())
    masters = state.masters()
    assert [master.names for master in masters] == [(name,) for name in before.values()]
    for master in masters:
        held = master.tensor.flatten()
        assert held.numel() == sum(chunk.numel for chunk in master.chunks)
        for chunk in master.chunks:
            assert held.tolist() == list(range(chunk.start, chunk.stop))


class Trained(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embedding(tokens)
        for layer in self.layers:
            found = layer(found)
        return torch.as_tensor(self.head(found))


def allocated(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the shards, of their gradients and of what the optimizer keeps of them, each storage once."""
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local if tensor is not None and tensor.dim()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def added_up(model: nn.Module) -> int:
    """Bytes of the whole gradients of a step that is not at its last micro-batch."""
    sharded = [each for group in parameter_groups(model) for each in group.fsdp_params]
    sums = [(each.unsharded_accumulated_grad, each._unsharded_param.grad) for each in sharded]
    return sum(tensor.untyped_storage().nbytes() for pair in sums for tensor in pair if tensor is not None)


def test_what_a_model_is_given_and_gives_has_the_types_that_the_options_say(world: Any) -> None:
    world(0, 1)

    def given(**options: Any) -> torch.dtype:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard_model(model, {**OPTIONS, "param_dtype": "bfloat16", "shard": ["Linear"], **options}, CPU)
        answer: torch.Tensor = model(torch.ones(2, 4))
        return answer.dtype

    assert given() == torch.bfloat16
    assert given(output_dtype="float32") == torch.float32
    with pytest.raises(RuntimeError, match="same dtype"):
        given(cast_forward_inputs=False)


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"param_dtype": "bfloat16"}),
        (torch.float32, {"param_dtype": "bfloat16", "reduce_dtype": "float32", "cpu_offload": True}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"reduce_dtype": "float32", "cpu_offload": True}),
    ],
    ids=["fp32", "computes in bf16", "offload", "bf16", "bf16 offload"],
)
def test_the_first_rank_tells_what_it_has_allocated(
    world: Any, size: int, kind: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    world(0, size)
    model: Any = Trained().to(dtype)
    model.layers[1].up.weight.requires_grad_(False)
    optimizer = kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    mesh = shard_model(model, OPTIONS | options, CPU)
    repoint(optimizer, before, dict(model.named_parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6)).float().sum().backward()
        optimizer.step()
    real = allocated(model, optimizer)
    state = Fsdp2State(model, optimizer, None, mesh)
    held, own = held_state(state, CPU, 1)
    assert own == real == state_bytes(replace(held, passes=size), MeshSettings(), size)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.arange(6)).float().sum().backward()
    several = max(real, allocated(model, optimizer) + added_up(model))
    same, own = held_state(state, CPU, 1, adds_up=True)
    assert own == several == state_bytes(replace(held, passes=size + 1), MeshSettings(), size)
    assert same == held
    # Whatever is sharded is in host memory.
    assert held_state(state, torch.device("cuda"), 1)[1] == 0


def test_a_mesh_of_before_is_not_taken_for_one_of_another_rank(world: Any) -> None:
    for rank in (0, 1):
        world(rank, 2)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh = shard_model(model, OPTIONS, CPU)
        repoint(optimizer, before, dict(model.named_parameters()))
        assert Fsdp2State(model, optimizer, None, mesh).masters()[0].chunks[0].start == 6 * rank
        dist.destroy_process_group()


def test_what_cannot_be_sharded_is_refused_by_name(world: Any) -> None:
    world(0, 2)
    with torch.device("meta"):
        absent = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="parameter 'weight' is on the meta device"):
        shard_model(absent, OPTIONS, CPU)
    scalar = nn.Linear(2, 2)
    scalar.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(UsageError, match="parameter 'temperature' has no dimension"):
        shard_model(scalar, OPTIONS, CPU)
    whole = nn.Linear(2, 2)
    fully_shard(whole)
    with pytest.raises(UsageError, match=r"fsdp2\.shard_workers says over which workers"):
        shard_model(whole, {**OPTIONS, "shard_workers": 2}, CPU)
    partly = Model()
    fully_shard(partly.head)
    with pytest.raises(UsageError, match=r"parameter 'head\.weight' is a DTensor already"):
        shard_model(partly, OPTIONS, CPU)
    smaller = nn.Linear(2, 2)
    fully_shard(smaller, mesh=dist.device_mesh.DeviceMesh("cpu", [0]))
    with pytest.raises(UsageError, match="only rows over all 2 ranks"):
        shard_model(smaller, OPTIONS, CPU)


def test_an_optimizer_that_is_not_the_models_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with pytest.raises(UsageError, match="group 0 has a parameter at place 0 that the model does not have"):
        repoint(torch.optim.SGD(other.parameters(), lr=0.1), names, dict(model.named_parameters()))
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    with pytest.raises(UsageError, match="has made steps already"):
        repoint(used, names, dict(model.named_parameters()))


def test_a_model_that_the_user_has_sharded_keeps_its_sharding(world: Any) -> None:
    world(1, 2)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    held = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = shard_model(model, OPTIONS, CPU)
    assert all(now is was for now, was in zip(model.parameters(), held, strict=True))
    assert len(Fsdp2State(model, optimizer, None, mesh).masters()) == len(held)


@pytest.mark.parametrize(("size", "workers"), [(4, 2), (6, 3), (12, 4)])
def test_copies_of_shards_write_each_element_once_and_have_the_rows_that_torch_gives_them(
    world: Any, size: int, workers: int
) -> None:
    counts: dict[str, torch.Tensor] = {}
    for rank in range(size):
        world(rank, size)
        state, whole = _with_copies(workers)
        for master in state.masters():
            for chunk in master.chunks:
                rows = whole[chunk.name].flatten()[chunk.start : chunk.stop]
                assert torch.equal(master.tensor.flatten(), rows), chunk.name
        assert state.writers == tuple(range(rank % workers, size, workers))
        for chunk in Inventory.of(state).written(state.rank, state.world_size, state.writers).chunks:
            count = counts.setdefault(chunk.name, torch.zeros(whole[chunk.name].numel()))
            count[chunk.start : chunk.stop] += 1
        dist.destroy_process_group()
    assert counts.keys() == whole.keys()
    assert all(count.eq(1).all() for count in counts.values())


@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_copies_of_shards_in_large_worlds(world: Any, rank: int) -> None:
    world(rank, 1024)
    state, whole = _with_copies(8)
    assert (state.rank, state.world_size, state.part) == (rank, 1024, (8, rank % 8))
    assert state.copies is not None
    assert dist.get_process_group_ranks(state.copies) == list(range(rank % 8, 1024, 8))
    assert dist.get_process_group_ranks(state.once) == list(range(rank // 8 * 8, rank // 8 * 8 + 8))
    held = {chunk.name for master in state.masters() for chunk in master.chunks}
    assert held == {name for name, value in whole.items() if rank % 8 * -(-value.shape[0] // 8) < value.shape[0]}


@pytest.mark.parametrize("workers", [2, 4, 5])
def test_a_world_of_other_than_several_whole_groups_has_no_copies(world: Any, workers: int) -> None:
    world(1, 4 if workers != 2 else 5)
    state, _ = _with_copies(workers)
    assert state.copies is state.once is state.writers is None


def _with_copies(workers: int) -> tuple[Fsdp2State, dict[str, torch.Tensor]]:
    """The state of a model over `workers` and their copies, and its parameters before it was sharded."""
    torch.manual_seed(0)
    model = Model()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    meshes = shard_model(model, {**OPTIONS, "shard_workers": workers}, CPU)
    repoint(optimizer, before, dict(model.named_parameters()))
    return Fsdp2State(model, optimizer, None, meshes), whole

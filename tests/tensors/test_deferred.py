"""Models on the meta device: their initial weights are those of a model that was built on one device, whichever part of
them a rank has. Worlds of up to 1,024 ranks under torch's fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh
from elastic.engines.fsdp2.config import Options
from elastic.engines.fsdp2.meshes import forget_meshes
from elastic.engines.fsdp2.pipeline.sharding import shard_stage
from elastic.engines.fsdp2.sharding import shard_model
from elastic.engines.model.expert_layers import require_shareable
from elastic.engines.model.pipeline import Pipeline

CPU, OPTIONS = torch.device("cpu"), vars(Options())
PLAN = {"embed": RowwiseParallel(input_layouts=Replicate()), "layers.*.up": ColwiseParallel()}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.w1, self.w2 = nn.Parameter(torch.empty(8, 3, 4)), nn.Parameter(torch.empty(8, 4, 3))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.experts = nn.Linear(4, 8), nn.Linear(8, 4), Experts()
        self.down.bias.requires_grad_(False)


class Model(nn.Module):
    """Tied; torchtitan's layers, cache of rotations and `init_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.layers = nn.ModuleDict({str(place): Block() for place in range(2)})
        self.head.weight = self.embed.weight
        self.register_buffer("turns", torch.empty(6, dtype=torch.complex64), persistent=False)
        self.register_buffer("bias", torch.empty(4))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        self.turns = torch.polar(torch.ones(6, device=buffer_device), torch.arange(6.0, device=buffer_device))
        self.bias.fill_(0.5)
        # As torchtitan does it: `to_empty` makes two of them.
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight)
        for block in self.layers.values():
            block = getattr(block, "_checkpoint_wrapped_module", block)
            block.up.reset_parameters()
            nn.init.trunc_normal_(block.down.weight, std=0.3, a=-0.4, b=0.4)
            nn.init.constant_(block.down.bias, 0.25)[3] = 0.5
            block.experts.w1.data.uniform_(-1, 1).mul_(0.5)
            nn.init.orthogonal_(block.experts.w2)


@pytest.fixture
def world() -> Iterator[Any]:
    def begin(rank: int, size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield begin
    if dist.is_initialized():
        forget_meshes()
        dist.destroy_process_group()


def built(meta: bool, kind: Callable[[], nn.Module] = Model) -> Any:
    torch.manual_seed(5)
    with torch.device("meta"):
        model: Any = kind()
    if not meta:
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=CPU)
    for place, block in list(model.layers.items()):
        model.layers[place] = checkpoint_wrapper(block)  # type: ignore[no-untyped-call]
    return model


def sharded(model: nn.Module, tp: int, ep: int, pp: int, **options: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh.of(size, 1, tp, ep, pp)
    cell = dist.new_group(list(mesh.along("tp", rank)), use_local_synchronization=True) if tp > 1 else None
    layers = require_shareable(model, (ep,), (tp,)) if max(ep, tp) > 1 else {}
    plan: Any = [(f"layers.{place}.up", PLAN["layers.*.up"]) for place in range(2)]
    plan = (("embed", PLAN["embed"]), ("head", ColwiseParallel(output_layouts=Replicate())), *plan) if tp > 1 else None
    options = {**OPTIONS, "pipeline_stages_per_rank": 1, **options}
    if pp == 1:
        shard_model(model, options, CPU, True, plan, cell, mesh, layers)
        return
    pipeline, row = Pipeline(nn.functional.mse_loss), (("embed",), ("layers.0",), ("layers.1",), ("head",))
    shard_stage(model, pipeline, row, options, CPU, True, mesh, plan, cell, layers)


@pytest.mark.parametrize(
    ("rank", "size", "tp", "ep", "pp", "options"),
    [
        (0, 1, 1, 1, 1, {}),
        *((rank, 5, 1, 1, 1, {}) for rank in range(5)),
        (3, 4, 1, 1, 1, {"shard_workers": 2, "cpu_offload": True}),
        *((rank, 4, 2, 1, 1, {"shard": []}) for rank in range(4)),
        *((rank, 8, 2, 2, 1, {}) for rank in (0, 3, 6)),
        (5, 8, 1, 4, 1, {}),
        (6, 8, 1, 2, 1, {"shard_workers": 4}),
        (1023, 1024, 4, 2, 1, {}),
        # The first stage and the last have the tied parameter.
        *((rank, 6, 1, 1, 3, {}) for rank in (0, 3, 5)),
        *((rank, 8, 2, 2, 2, {"cpu_offload": True}) for rank in (1, 6)),
    ],
)
def test_a_rank_has_its_part_of_what_one_device_would_have(
    world: Any, rank: int, size: int, tp: int, ep: int, pp: int, options: dict[str, Any]
) -> None:
    world(rank, size)
    model, whole = built(meta=True), built(meta=False)
    before = torch.get_rng_state()
    sharded(model, tp, ep, pp, **options)
    assert torch.equal(torch.get_rng_state(), before), "data and dropout draw what they would draw without it"
    sharded(whole, tp, ep, pp, **options)
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == expected[name].placements
        assert torch.equal(parameter._local_tensor, expected[name]._local_tensor), name
        assert parameter.requires_grad == expected[name].requires_grad
    assert pp > 1 or model.head.weight is model.embed.weight
    assert [(name, type(module)) for name, module in model.named_modules()] == [
        (name, type(module)) for name, module in whole.named_modules()
    ]
    assert all(torch.equal(model.get_buffer(name), whole.get_buffer(name)) for name in ("turns", "bias"))


class Partly(Model):
    def init_weights(self) -> None:  # type: ignore[override]
        for name, parameter in self.named_parameters():
            if not name.endswith("up.bias"):
                nn.init.ones_(parameter)


class Replacing(Model):
    def init_weights(self, **_: Any) -> None:  # type: ignore[override]
        super().init_weights()
        self.layers["1"].up.bias = nn.Parameter(torch.ones(8))


class Again(Model):
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        self.layers["1"].up.bias.add_(1.0)


def test_what_another_stage_has_is_not_come_back_to(world: Any) -> None:
    """Of which no rank here has the value. What a rank has is gathered."""
    world(0, 2)
    with pytest.raises(UsageError, match=r"comes back to a parameter after others, and another stage has it"):
        sharded(built(True, Again), 1, 1, 2)


def test_what_cannot_be_given_values_is_refused_by_name(world: Any) -> None:
    world(0, 2)
    with torch.device("meta"):
        absent, given = nn.Linear(2, 2), Model()
    with pytest.raises(UsageError, match=r"parameter 'weight' is on the meta device, and Linear has no init_weights"):
        shard_model(absent, OPTIONS, CPU)
    given.layers["0"].down = nn.Linear(8, 4)
    with pytest.raises(
        UsageError, match=r"'embed\.weight' is on the meta device, and 'layers\.0\.down\.weight' is not"
    ):
        shard_model(given, OPTIONS, CPU)
    for kind, place in ((Partly, 0), (Replacing, 1)):
        said = rf"init_weights\(\) gives no values to parameter 'layers\.{place}\.up\.bias' where it is"
        with pytest.raises(UsageError, match=said):
            shard_model(built(True, kind), OPTIONS, CPU)
    own = built(meta=True)
    fully_shard(own)
    with pytest.raises(UsageError, match=r"is on the meta device, and the script has called fully_shard itself"):
        shard_model(own, OPTIONS, CPU)

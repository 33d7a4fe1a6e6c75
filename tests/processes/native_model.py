"""A small model with everything that has hurt a resharder before, and the DeepSpeed configuration around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, SAMPLES, LENGTH = 11, 7, 6, 4


@dataclass(frozen=True)
class Setup:
    """One way to train. `zero` goes into `zero_optimization`; `extra` into the configuration itself."""

    stage: int
    optimizer: str = "adamw"
    bf16: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def round_robin(self) -> bool:
        return bool(self.zero.get("round_robin_gradients"))


class Drift(nn.Module):
    """Buffers that matter: lost or mixed up, they change the loss. They depend on the number of passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean.mul_(0.9).add_(0.1 * self.count.item())
            self.cache.add_(0.25)
            self.mask.logical_not_()
        return x + 0.05 * self.mean.to(x.dtype) + 0.01 * (self.cache.sum() + self.mask.sum()).to(x.dtype)


class Model(nn.Module):
    """Tied weights, frozen ones, one that is never used, parameters of 1, 3, 5, 7 elements, eleven equal layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(11))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.frozen_one = nn.Parameter(torch.rand(1), requires_grad=False)
        self.drift = Drift()
        self.three = nn.Parameter(torch.rand(3))
        self.scale = nn.Parameter(torch.ones(1) + 0.1 * torch.rand(1))
        self.unused = nn.Parameter(torch.rand(5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens)) * self.frozen_one
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.drift(x) * self.scale + self.three.sum()
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def parameter_groups(model: Model) -> list[dict[str, Any]]:
    """Three groups; the last is so small that all ranks but the first hold only padding of it."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in trained if p.dim() > 1], "lr": 0.02, "weight_decay": 0.1},
        # A frozen parameter in a group: DeepSpeed leaves it out.
        {"params": [p for n, p in trained if p.dim() == 1 and n != "scale"] + [model.frozen_one], "lr": 0.01},
        {"params": [model.scale], "lr": 0.03, "weight_decay": 0.0},
    ]


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)
        case "sgd":
            return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        case "plain":
            return torch.optim.SGD(groups, lr=0.01)
        case "amsgrad":
            return torch.optim.Adam(groups, lr=0.01, amsgrad=True)
        case _:
            raise ValueError(name)


def make_engine(setup: Setup, world_size: int, seed: int) -> Any:
    import deepspeed

    model = Model(seed)
    optimizer = make_optimizer(setup.optimizer, parameter_groups(model))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3, 5, 5], gamma=0.5)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": setup.stage, **setup.zero},
        **({"bf16": {"enabled": True}} if setup.bf16 else {}),
        **setup.extra,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    return engine


def train_step(engine: Any, step: int) -> float:
    """One optimizer step on the global batch of `step`; the loss of the whole batch."""
    from deepspeed import comm

    rank, world_size = comm.get_rank(), comm.get_world_size()
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    loss = engine(batch.chunk(world_size)[rank])
    engine.backward(loss)
    engine.step()
    total = loss.detach().double().clone()
    comm.all_reduce(total)
    return float(total) / world_size

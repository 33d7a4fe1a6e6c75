"""Models made of nothing but tensors of given names and shapes, engines around them, and the values to put in.

Nothing here is ever trained: a value depends on (version, kind, name, index) alone, so that every permutation, every
mix of two steps and every lost element shows, and what a restored engine must hold is known without a reference run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock
from zlib import crc32

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Optimizer -> the tensors that it keeps per parameter, and whether it counts steps there.
KINDS = {
    "adamw": (("exp_avg", "exp_avg_sq"), True),
    "sgd": (("momentum_buffer",), False),
    "lion": (("exp_avg",), False),
}


@dataclass(frozen=True)
class Parameter:
    """`group` is the optimizer's parameter group; None: frozen."""

    name: str
    shape: tuple[int, ...]
    group: int | None = 0
    # Other names of the same tensor.
    ties: tuple[str, ...] = ()
    # No gradient ever reached it: where the optimizer keeps state per parameter, it has none.
    idle: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    persistent: bool = True


PLAIN = (
    Parameter("embedding.weight", (11, 7), ties=("head.weight",)),
    Parameter("layers.2.weight", (7, 7)),
    Parameter("layers.10.weight", (7, 7)),
    Parameter("layers.2.bias", (7,), group=1),
    Parameter("layers.10.bias", (7,), group=1),
    Parameter("three", (3,), group=1),
    Parameter("unused", (5,), group=1, idle=True),
    Parameter("scale", (1,), group=2),
    # DeepSpeed cannot broadcast a parameter without dimensions; a buffer may have none.
    Parameter("point", (1, 1), group=2),
    Parameter("frozen.weight", (13,), group=None),
    Parameter("frozen.one", (1,), group=None),
)
BUFFERS = (
    Buffer("drift.mean", (7,)),
    Buffer("drift.count", (), torch.int64),
    Buffer("drift.mask", (3,), torch.bool),
    Buffer("drift.cache", (3,), persistent=False),
)


@dataclass(frozen=True)
class Setup:
    """One way to hold a training state. `zero` goes into `zero_optimization`, `extra` next to it."""

    stage: int
    dtype: str = "fp32"
    optimizer: str = "adamw"
    zero: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = PLAIN
    buffers: tuple[Buffer, ...] = BUFFERS

    @property
    def groups(self) -> int:
        return 1 + max(parameter.group or 0 for parameter in self.parameters)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.group is not None)

    def __str__(self) -> str:
        options = [short for name, short in _SHORT.items() if name in self.zero or name in self.extra]
        groups = f"{self.groups} group{'s' if self.groups > 1 else ''}"
        return ", ".join([f"stage {self.stage}", self.dtype, self.optimizer, groups, *options])


# What the table calls an option.
_SHORT = {
    "sub_group_size": "sub-groups",
    "round_robin_gradients": "round robin",
    "parameter_alignment": "aligned",
    "data_types": "fp32 gradients",
}


class Lion(torch.optim.Optimizer):
    """One moment, no step count: what its state looks like is all that is needed here."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    moment.lerp_(parameter.grad, 0.01)
                    parameter.sub_(moment.sign(), alpha=group["lr"])


@lru_cache(maxsize=20_000)
def value(version: str, kind: str, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The content of one whole tensor, 1-D. Never written to."""
    generator = torch.Generator().manual_seed(crc32(f"{version} {kind}/{name}".encode()))
    if dtype is torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(1, 1 << 40, (numel,), generator=generator).to(dtype)
    # Moments of size one and second moments above zero, so that no two of an element's values are near each other.
    found = torch.randn(numel, generator=generator)
    return (found.square() + 2.0 if kind.endswith("_sq") else found).to(dtype)


def make_model(setup: Setup, version: str) -> torch.nn.Module:
    """A module tree that has the setup's tensors under their names, filled with `version`'s values."""
    dtype = DTYPES[setup.dtype]
    root = torch.nn.Module()
    for parameter in setup.parameters:
        content = value(version, "master", parameter.name, parameter.numel, torch.float32).to(dtype)
        made = torch.nn.Parameter(content.reshape(parameter.shape).clone(), requires_grad=parameter.group is not None)
        for name in (parameter.name, *parameter.ties):
            owner, leaf = _owner(root, name)
            owner.register_parameter(leaf, made)
    for buffer in setup.buffers:
        content = value(version, "buffer", buffer.name, math.prod(buffer.shape), buffer.dtype)
        owner, leaf = _owner(root, buffer.name)
        owner.register_buffer(leaf, content.reshape(buffer.shape).clone(), persistent=buffer.persistent)
    return root


def make_engine(setup: Setup, version: str) -> Any:
    """DeepSpeed's own engine of the calling rank. The hyper-parameters, too, depend on `version`."""
    import deepspeed

    model = make_model(setup, version)
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(setup.groups)]
    for parameter in setup.trained:
        groups[parameter.group or 0]["params"].append(named[parameter.name])
    for number, group in enumerate(groups):
        # Without decay: DeepSpeed's first, empty step would apply it to the masters and not to the weights.
        group |= {"lr": rate(version, number), "weight_decay": 0.0}
    optimizer = make_optimizer(setup.optimizer, groups)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 30, 50, 50], gamma=0.5)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.stage, **setup.zero},
        **({setup.dtype: {"enabled": True}} if setup.dtype != "fp32" else {}),
        **setup.extra,
    }
    with _halves():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
        )
    return engine


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=0.01)
        case "sgd":
            return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        case _:
            return Lion(groups, lr=0.01)


def rate(version: str, group: int) -> float:
    """The learning rate that a group of a state has."""
    return (1 + crc32(version.encode()) % 7) * 0.01 / (1 + group)


def steps_done(version: str, group: int) -> int:
    """How often the optimizer has stepped for a group's parameters: a later group joined later."""
    return 20 + crc32(version.encode()) % 9 - 3 * group


@contextmanager
def _halves() -> Iterator[None]:
    """DeepSpeed believes that a CPU cannot compute in fp16. What is looked at here is state, not computation."""
    from deepspeed.accelerator import get_accelerator

    dtypes = list(DTYPES.values())
    with mock.patch.multiple(get_accelerator(), is_fp16_supported=lambda: True, supported_dtypes=lambda: dtypes):
        yield


def _owner(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    return root, leaf

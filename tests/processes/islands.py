"""Training in islands, and the same algorithm in plain torch: what ranks do, and what must come out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import crew
import torch
from convex import DIMENSIONS, SAMPLES, Samples, problem
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import elastic
from elastic.core.data.micro_batches import deal
from elastic.core.data.samples import SampleOrder
from elastic.core.settings import CommunicationSettings

BATCH, MICRO = 40, 8
# Places of the parameters of `Net` in its list, in two fragments of about the same size.
FRAGMENTS = {1: ((0, 1, 2, 3),), 2: ((0,), (1, 2, 3))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(DIMENSIONS, 6), nn.Linear(6, 1)
        for parameter in self.parameters():
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=chance))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.tanh(self.first(x))).squeeze(-1)
        return found


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.3)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def decay_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def train(config: dict[str, Any]) -> None:
    """`config`: "stays" is the (rank, step) that never goes on from there, "bad" the one with a loss that is no number,
    "points" tells of every step; "asks" the step in which the script saves; with "decays" the rate becomes less with
    every step. "leaves" is the step after which it has had enough."""
    model = Net()
    optimizer = optimizer_of(model, config["optimizer"])
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=decay_of(optimizer) if config.get("decays") else None,
        training_data=Samples(),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": MICRO,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 0.0,
            **config.get("top", {}),
        },
    )
    dtype = next(engine.module.parameters()).dtype
    for _ in elastic.epochs():
        for x, y in loader:
            context = elastic.get_context()
            if config.get("points"):
                crew.point(f"begins step {context.step + 1}")
            if config.get("stays") == (context.rank, context.step):
                crew.point("stays")
                crew.stay()
            loss = binary_cross_entropy_with_logits(engine(x.to(dtype)).float(), y)
            engine.backward(loss * float("nan") if config.get("bad") == (context.rank, context.step) else loss)
            engine.step()
            if config.get("asks") == context.step:
                engine.save_checkpoint()
            if config.get("leaves") == elastic.get_context().step:
                break
        if config.get("leaves"):
            break
    crew.told["weights"] = {name: p.detach().float().clone() for name, p in model.named_parameters()}


class Oracle:
    """One model per island, one outer optimizer, in one process. What is exchanged is there at once."""

    def __init__(self, settings: CommunicationSettings, optimizer: str, steps: int, clip: float = 0.0) -> None:
        self._clip = clip
        self.settings, self.steps, self.step = settings, steps, 0
        self._name, self._outer = optimizer, Net()
        plain = settings.strategy == "local_sgd"
        lr, beta = (1.0, 0.0) if plain else (settings.outer_lr, settings.outer_momentum)
        self._outer_step = torch.optim.SGD(self._outer.parameters(), lr=lr, momentum=beta, nesterov=beta > 0.0)
        self.islands: list[tuple[Net, torch.optim.Optimizer, list[int]]] = []

    def run(self, islands: Sequence[Sequence[int]], until: int) -> dict[str, torch.Tensor]:
        """Goes on with these ranks in islands; returns the outer weights."""
        self._move(len(islands))
        order, (x, y) = SampleOrder(SAMPLES, 0), problem()
        ranks = sum(len(own) for own in islands)
        for step in range(self.step + 1, until + 1):
            self.step = step
            for own, (model, optimizer, counts) in zip(islands, self.islands, strict=True):
                dealt = [b for r in own for b in deal(self.step - 1, BATCH, MICRO, ranks, r) if b.weight > 0.0]
                rows = [row for batch in dealt for row in order.indices(batch.start, batch.stop)]
                optimizer.zero_grad()
                binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
                if self._clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self._clip)
                optimizer.step()
                counts[:] = [count + len(rows) for count in counts]
            self._exchange()
        return {name: p.detach().clone() for name, p in self._outer.named_parameters()}

    def _move(self, count: int) -> None:
        before = self.islands
        self.islands = []
        for number in range(count):
            # A new island: the outer weights, and a peer's optimizer.
            old, inner, counts = before[number % len(before)] if before else (None, None, [])
            joins = number >= len(before)
            model = copy.deepcopy(self._outer if joins or old is None else old)
            optimizer = optimizer_of(model, self._name)
            if inner is not None:
                optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
            parts = self.settings.fragments if self.settings.strategy == "streaming_diloco" else 1
            self.islands.append((model, optimizer, [0] * parts if joins else counts))

    def _exchange(self) -> None:
        parts = len(self.islands[0][2])
        gap = self.settings.every_steps // parts
        due = [(self.step // gap - 1) % parts] if self.step % gap == 0 else []
        outer = list(self._outer.parameters())
        for part in range(parts) if self.step == self.steps else due:
            own = FRAGMENTS[parts][part]
            total = sum(counts[part] for _, _, counts in self.islands)
            for number, parameter in enumerate(outer):
                parameter.grad = None
                if number in own and total:
                    theirs = [(list(model.parameters())[number], counts[part]) for model, _, counts in self.islands]
                    parameter.grad = sum(((parameter - p).detach() * (n / total) for p, n in theirs), start=0.0)
            self._outer_step.step()
            for model, _, counts in self.islands:
                counts[part] = 0
                for number in own:
                    list(model.parameters())[number].data.copy_(outer[number].data)

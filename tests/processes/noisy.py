"""Training functions whose gradient noise is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import Numbers, Small, build, of_engine, one_pass, train

import elastic
from elastic.training.watch import step_measures

# Of every sample's coordinates, and how far the weights, which stay zero, are from their mean.
SPREADS = (0.5, 1.0, 1.5, 2.0)
FAR = 0.5


class Same(Numbers):
    """Every sample is the same one: single gradients have no noise."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        return torch.randn(16, generator=generator).to(self.dtype), torch.tensor([1.0, -2.0, 3.0]).to(self.dtype)


def train_on_one_sample(config: dict[str, Any]) -> None:
    """As `trainings.train`."""
    import trainings

    trainings.Numbers = Same  # type: ignore[misc]
    try:
        trained, loader = build(config)
    finally:
        trainings.Numbers = Numbers  # type: ignore[misc]
    for batch in loader:
        one_pass(trained, batch)


def train_uncounted(config: dict[str, Any]) -> None:
    """As `trainings.train`, without the count of FLOPs."""
    counted, step_measures.FlopCount = step_measures.FlopCount, lambda _: None  # type: ignore[assignment, misc]
    try:
        train(config)
    finally:
        step_measures.FlopCount = counted  # type: ignore[misc]


class Points(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.randn(len(SPREADS), generator=torch.Generator().manual_seed(index))
        return drawn * torch.tensor(SPREADS) + FAR


class Distance(nn.Module):
    """Half the squared distance to a point: the gradient at weights w is w - x, its covariance that of the points."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(len(SPREADS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x - self.center).square().sum(dim=1).mean() / 2
        return loss


def train_where_noise_is_known(config: dict[str, Any]) -> None:
    model = Distance()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trained, _, loader, _ = elastic.initialize(
        model=model, training_data=Points(config["size"]), optimizer=optimizer, **of_engine(config, optimizer)
    )
    for batch in loader:
        trained.backward(trained(batch))
        trained.step()


class Reentrant(Small):
    """A layer whose weight two checkpointed parts share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.second(x)
        return out


def train_reentrant(config: dict[str, Any]) -> None:
    model = Reentrant(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    trained, _, loader, _ = elastic.initialize(
        model=model, training_data=Numbers(37, torch.float32), optimizer=optimizer, **of_engine(config, optimizer)
    )
    for batch in loader:
        one_pass(trained, batch)

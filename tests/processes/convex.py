"""A convex problem: logistic regression, whose optimum is found by Newton's method; trained as a user would."""

from __future__ import annotations

from typing import Any

import crew
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import elastic
from elastic.comm.strategies.error_feedback import ErrorFeedback

DIMENSIONS, SAMPLES = 120, 960


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Features of unlike size, and labels that no plane separates."""
    chance = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, DIMENSIONS, generator=chance) * torch.logspace(0, -1, DIMENSIONS)
    plane = torch.randn(DIMENSIONS, generator=chance)
    y = (x @ plane + 3.0 * torch.randn(SAMPLES, generator=chance) > 0).float()
    return x, y


def optimum(ridge: float) -> float:
    """The least value of the objective that `train` is after, to fp64's precision."""
    x, y = (tensor.double() for tensor in problem())
    plane = torch.zeros(DIMENSIONS, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(x @ plane)
        gradient = x.T @ (p - y) / SAMPLES + ridge * plane
        hessian = (x * (p * (1 - p))[:, None]).T @ x / SAMPLES + ridge * torch.eye(DIMENSIONS, dtype=torch.float64)
        plane -= torch.linalg.solve(hessian, gradient)
    return objective(plane, ridge)


def objective(plane: torch.Tensor, ridge: float) -> float:
    x, y = (tensor.double() for tensor in problem())
    plane = plane.double()
    return float(binary_cross_entropy_with_logits(x @ plane, y) + ridge / 2 * plane.square().sum())


class Plane(nn.Module):
    """Its parameter is a matrix, so that it can be sent as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, DIMENSIONS // 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.reshape(-1)


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = problem()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def train_and_forget(config: dict[str, Any]) -> None:
    """As `train`; what error feedback holds is dropped. `config["forgets"]`: "install" where the world changes, "_keep"
    in every step."""
    before = getattr(ErrorFeedback, config["forgets"])
    setattr(ErrorFeedback, config["forgets"], lambda *_: None)
    try:
        train(config)
    finally:
        setattr(ErrorFeedback, config["forgets"], before)


def train(config: dict[str, Any]) -> None:
    """SGD from zero."""
    model = Plane()
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config["lr"], weight_decay=config.get("ridge", 0.0)),
        training_data=Samples(),
        config={
            "train_batch_size": config["batch"],
            "train_micro_batch_size_per_gpu": config["micro"],
            "zero_optimization": {"stage": config["stage"]},
        },
    )
    for _ in elastic.epochs():
        for x, y in loader:
            engine.backward(binary_cross_entropy_with_logits(engine(x), y))
            engine.step()
    crew.told["objective"] = objective(model.weight.detach().reshape(-1), config.get("ridge", 0.0))

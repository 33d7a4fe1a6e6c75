"""Optimizers that look at whole tensors, as scripts have them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from elastic.engines.fsdp2.update import whole_step


class Orthogonal(torch.optim.Optimizer):
    """Of `matrices` the momentum's columns, or rows, are made orthogonal; the others by Adam. Whatever it keeps is made
    anew in each step. `marked`: one group, and in the state of each parameter what it is, or written on it."""

    def __init__(self, matrices: list[Any], rest: list[Any], marked: str = "") -> None:
        both = [{"params": rest}, {"params": matrices, "matrices": True}]
        super().__init__([*rest, *matrices] if marked else both, {"lr": 0.02, "matrices": False})
        for parameters, is_matrix in ((matrices, True), (rest, False)):
            for parameter in parameters if marked == "marked" else ():
                self.state[parameter]["matrix"] = is_matrix
            for parameter in parameters if marked == "written on" else ():
                parameter.matrix = is_matrix

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                written = getattr(parameter, "matrix", group["matrices"])
                change = self._orthogonal if state.get("matrix", written) else self._adam
                parameter.add_(change(state, parameter.grad), alpha=-group["lr"])

    def _orthogonal(self, state: Any, gradient: torch.Tensor) -> Any:
        state["momentum"] = 0.9 * state["momentum"] + gradient if "momentum" in state else gradient.clone()
        found = state["momentum"] / state["momentum"].norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)
        for _ in range(4):
            found = 1.5 * found - 0.5 * found @ found.mT @ found
        return found

    def _adam(self, state: Any, gradient: torch.Tensor) -> Any:
        first, second = state.get("first", torch.zeros_like(gradient)), state.get("second", torch.zeros_like(gradient))
        state["steps"] = state.get("steps", 0) + 1
        state["first"], state["second"] = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient.square()
        mean, square = (state[key] / (1 - rate ** state["steps"]) for key, rate in (("first", 0.9), ("second", 0.99)))
        return mean / (square.sqrt() + 1e-6)


class Factored(torch.optim.Optimizer):
    """Keeps the mean square of rows and of columns, the products of a matrix with its own in a list, and a momentum;
    counts steps in its groups, as a number, before which it has made its state, and as a tensor."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, {"lr": 0.02})
        for group in self.param_groups:
            group["beta"] = torch.tensor(1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" not in group:
                for parameter in (p for p in group["params"] if p.grad is not None):
                    self._begin(self.state[parameter], parameter.grad)
            group["step"] = group.get("step", 0) + 1
            group["beta"] *= 0.9
            rate = group["lr"] * (1 + 1 / group["step"] + float(group["beta"]))
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                for side, product in enumerate(state["products"]):
                    if product is not None:
                        flat = gradient.transpose(-2, side - 2).reshape(len(product), -1)
                        product.mul_(0.9).addmm_(flat, flat.T)
                change = state["momentum"].mul_(0.9).add_(gradient).clone()
                for dim, square in state["squares"].items():
                    rest = [other for other in range(gradient.dim()) if other != int(dim)]
                    square.mul_(0.9).add_(gradient.square().sum(rest) if rest else gradient.square(), alpha=0.1)
                    shape = [-1 if other == int(dim) else 1 for other in range(gradient.dim())]
                    change /= (square.view(shape) + 1e-6).sqrt().sqrt()
                for product in (found for found in state["products"] if found is not None):
                    change /= 1 + product.trace()
                parameter.add_(change, alpha=-rate)

    def _begin(self, state: Any, gradient: torch.Tensor) -> None:
        sides = gradient.shape[-2:] if gradient.dim() > 1 else ()
        state["products"] = [gradient.new_zeros(size, size) if size < 20 else None for size in sides]
        state["momentum"] = torch.zeros_like(gradient)
        state["squares"] = {str(dim): gradient.new_zeros(gradient.shape[dim]) for dim in range(gradient.dim())}


def is_muon_of_deepspeed(config: dict[str, Any]) -> bool:
    """Does DeepSpeed's configuration say it? Then it is not compiled, which would take longer than the run."""
    found: bool = config.get("top", {}).get("optimizer", {}).get("type") == "Muon"
    if found or "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager" if found and not config.get("compiled") else "default")
    return found


def of(config: dict[str, Any], given: Iterable[Any], **adamw: Any) -> Any:
    """What `config["optimizer"]` says, of these parameters or groups of them; AdamW where it says nothing, and None
    where DeepSpeed's configuration has one."""
    parameters = list(given)
    if is_muon_of_deepspeed(config):
        return None
    if "optimizer" not in config:
        return torch.optim.AdamW(parameters, **adamw)
    flat = [p for each in parameters for p in (each["params"] if isinstance(each, dict) else [each])]
    matrices, rest = [p for p in flat if p.dim() > 1], [p for p in flat if p.dim() < 2]
    # One byte: each tensor of an owner has a round by itself.
    whole_step._ROUND_BYTES = 1 if config.get("small rounds") else 1 << 20
    if config["optimizer"] == "factored":
        return Factored([{"params": matrices}, {"params": rest}])
    if config["optimizer"] == "adafactor":
        return transformers.Adafactor(flat, lr=0.02, relative_step=False, scale_parameter=True, beta1=0.9)
    if config["optimizer"] != "muon":
        return Orthogonal(matrices, rest, config["optimizer"].removeprefix("orthogonal"))
    return [torch.optim.AdamW(rest, lr=0.02), torch.optim.Muon(matrices, lr=0.02)]

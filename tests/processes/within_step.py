"""A training function in which a rank is lost within a step, at a place that the test chooses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import crew
import torch
import torch.distributed as dist
from torch import nn
from trainings import Numbers, deepspeed_config

import elastic

WORLD, PER_RANK = 4, 16


class Plain(nn.Module):
    """Weights, a constant buffer, dropout; `counts`: a buffer that forward passes change."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((3,), 0.5))
        if counts:
            self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "passes"):
            self.passes += 1
        return self.second(self.dropout(torch.tanh(self.first(x)))) * self.scale


class Average:
    """Of the weights, where each rank has them, updated after each step, also after one that was abandoned."""

    def __init__(self, model: nn.Module) -> None:
        self.weight = model.first.weight.detach().clone()

    def update(self, model: nn.Module) -> None:
        self.weight.lerp_(model.first.weight.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def train(config: dict[str, Any]) -> None:
    """`config["faults"]` in step `config["at"]`, by generation and rank: what `Fault` does, and in which of the rank's
    micro-batches, from 1."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    dtype = torch.bfloat16 if config.get("dtype") == "bf16" else torch.float32
    model = Plain(config.get("counts", False))
    engine, optimizer, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        training_data=Numbers(1000, dtype),
        config={
            **deepspeed_config(config),
            "train_batch_size": WORLD * PER_RANK,
            "train_micro_batch_size_per_gpu": 1,
        },
        num_workers=config.get("num_workers", 0),
    )
    elastic.state["starts"] = crew.told["starts"] = 1
    average = Average(model)
    elastic.state.register(average=average)
    passes: Counter[tuple[int, int]] = Counter()
    crew.told["passes"] = passes
    crew.told["abandoned"] = 0
    at, number, fault = (0, 0), 0, Fault(config, engine, model)
    for _ in elastic.epochs():
        for x, y in loader:
            context = elastic.get_context()
            last = engine.is_gradient_accumulation_boundary()
            before, at = at, (context.generation, context.step)
            number = number + 1 if at == before else 1
            if number == 1 and config.get("clears"):
                # A habit from scripts without gradient accumulation.
                optimizer.zero_grad()
            passes[context.world_size, context.step] += engine.batch_share > 0
            fault.comes(context, number, "forward")
            loss = nn.functional.mse_loss(engine(x).float(), y.float())
            fault.comes(context, number, "backward")
            engine.backward(loss)
            fault.comes(context, number, "step")
            engine.step()
            if config.get("counts_batches") and elastic.get_context().rank == 0:
                elastic.state["seen"] = crew.told["seen"] = elastic.state.get("seen", 0) + len(x)
            if last and config["stage"] < 2:
                average.update(model)
            crew.told["abandoned"] += elastic.get_context().abandoned
            if elastic.get_context().abandoned and config.get("clears"):
                optimizer.zero_grad()


class Fault:
    """The victim stays where the test kills it. The others go on, which blocks them
    in the step's collectives, but for these: "between" waits until the generation has ended, before its micro-batch;
    "within" enters a collective of its own in the middle of a backward, which nobody answers."""

    def __init__(self, config: dict[str, Any], engine: Any, model: nn.Module) -> None:
        self._config = config
        self._engine = engine
        self._model = model

    def comes(self, context: elastic.Context, number: int, place: str) -> None:
        if context.step != self._config.get("at"):
            return
        kinds: dict[int, tuple[str, int]] = self._config["faults"].get(context.generation, {})
        where, at = kinds.get(context.rank, ("", 0))
        if number == at and place == _PLACES.get(where, where):
            _ACTIONS.get(where, _stay)(self)

    def wait_for_the_end(self) -> None:
        crew.point("there")
        while not elastic.get_context().abandoned:
            time.sleep(0.01)

    def enter_a_collective(self) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            crew.point("there")
            dist.all_reduce(torch.ones(1))
            return gradient

        # The last layer's gradient is added before the first layer's comes.
        handle = self._model.first.weight.register_hook(hook)

    def stay_in_the_reduction(self) -> None:
        from deepspeed.comm import comm

        def stay(*_: Any, **__: Any) -> None:
            crew.point("there")
            crew.stay()

        for name in ("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "reduce", "reduce_scatter_tensor"):
            setattr(comm.cdb, name, stay)


def _stay(_: Fault) -> None:
    crew.point("there")
    crew.stay()


_PLACES = {"between": "forward", "within": "backward", "reduction": "backward"}
_ACTIONS: dict[str, Callable[[Fault], None]] = {
    "between": Fault.wait_for_the_end,
    "within": Fault.enter_a_collective,
    "reduction": Fault.stay_in_the_reduction,
}

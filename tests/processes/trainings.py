"""Training functions that the process tests run: small models, written as a user would write them."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
from contextlib import nullcontext
from typing import Any

import crew
import torch
import torch.distributed as dist
from torch import nn

import elastic
from elastic.comm.sockets import tcp_sockets


class Small(nn.Module):
    """Two layers of 16, dropout, a buffer that counts the weighted forward passes, a tied and a 3-element parameter."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(16, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return self.second(self.dropout(torch.tanh(self.first(x))))


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        crew.indices.append(index)
        if torch.utils.data.get_worker_info() is not None:
            require_no_group_sockets()
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        # Random augmentation: must depend on the sample's position alone.
        x = x + 0.01 * torch.randn(16)
        return x.to(self.dtype), torch.stack([x.sum(), x[0] * x[1], x.abs().max()]).to(self.dtype)


def require_no_group_sockets() -> None:
    """A data worker that held them would keep its parent's death from the other ranks."""
    store = int(os.environ["MASTER_PORT"])
    held = [found for found in tcp_sockets() if found.peer and store not in (found.peer[1], found.local[1])]
    if held:
        raise AssertionError(f"a data worker holds {held}")


def deepspeed_config(config: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_batch_size": 10,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": config.get("clipping", 0.5),
        "zero_optimization": {
            "stage": config["stage"],
            "stage3_param_persistence_threshold": 20,
            **config.get("zero", {}),
        },
        **config.get("top", {}),
    }
    if config.get("schedule", True):
        made["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}}
    if config.get("dtype") == "bf16":
        made["bf16"] = {"enabled": True, **config.get("bf16", {})}
    if config.get("dtype") == "fp16":
        # The scale grows several times within the run, so that its state has to be carried.
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    return made


def fsdp2_options(config: dict[str, Any]) -> dict[str, Any]:
    return {"global_batch": 10, "micro_batch": 2, "gradient_clipping": 0.5, **config.get("fsdp2", {})}


def of_engine(config: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """What `elastic.initialize` is given besides, for the engine that `config` names."""
    if config.get("engine", "deepspeed") == "deepspeed":
        return {"config": deepspeed_config(config)}
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    schedules = [torch.optim.lr_scheduler.LinearLR(each, start_factor=0.1, total_iters=5) for each in several]
    return {"config": fsdp2_options(config), "lr_scheduler": schedules if len(schedules) > 1 else schedules[0]}


def weights_of(config: dict[str, Any]) -> Any:
    """What a run begins with; `config["on rank 1"]`: what that rank finds there."""
    there = config.get("on rank 1")
    return {"source": there} if there is not None and elastic.get_context().rank == 1 else config.get("weights")


def believe_in_half_precision(believed: bool = True) -> None:
    """DeepSpeed believes that a CPU cannot compute in fp16; torch can. What is tested is the loss scaler's way."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    for name in ("is_fp16_supported", "supported_dtypes"):
        # Of a test before, in the same process.
        vars(accelerator).pop(name, None)
    if believed and accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    deepspeed = config.get("engine", "deepspeed") == "deepspeed"
    half = {"bf16": torch.bfloat16, "fp16": torch.float16} if deepspeed else {}
    dtype = half.get(config.get("dtype", ""), torch.float32)
    if dtype is torch.float16:
        believe_in_half_precision()
    model = Small(config.get("dropout", 0.0))
    optimizer: torch.optim.Optimizer
    if config.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=Numbers(config.get("size", 37), dtype),
        optimizer=optimizer,
        num_workers=config.get("num_workers", 0),
        weights=config.get("weights"),
        **of_engine(config, optimizer),
    )
    return engine, loader


def one_pass(engine: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    loss = nn.functional.mse_loss(engine(x).float(), y.float())
    engine.backward(loss)
    engine.step()
    return loss


def train(config: dict[str, Any]) -> None:
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
            elastic.report(rank=elastic.get_context().rank)
    crew.told.update(starts=elastic.state["starts"], passes=float(engine.module.passes), epoch=loader.epoch)


def train_and_keep_warnings(config: dict[str, Any]) -> None:
    """As `train`, with what the engine has warned of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("elastic")
    logger.addHandler(handler)
    try:
        train(config)
    finally:
        logger.removeHandler(handler)
    crew.told["warnings"] = said


def train_and_tell_walks(config: dict[str, Any]) -> None:
    """How often everything that Python collects was walked after the first generation had begun."""
    engine, loader = build(config)
    walks: list[int] = []

    def walked(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            walks.append(elastic.get_context().step)

    # Its own walks come when they may.
    gc.disable()
    gc.callbacks.append(walked)
    try:
        for _ in elastic.epochs():
            for batch in loader:
                one_pass(engine, batch)
        crew.told["walks"] = list(walks)
    finally:
        gc.callbacks.remove(walked)
        gc.enable()


def passes_by(config: dict[str, Any]) -> None:
    """`by` "model": without the engine, as scripts for torch's `fully_shard` call theirs; "evaluation": it trains in
    the mode of an evaluation, as with frozen statistics."""
    engine, loader = build(config)
    engine.train(config["by"] != "evaluation")
    call = engine.module if config["by"] == "model" else engine
    for _ in elastic.epochs():
        for x, y in loader:
            engine.backward(nn.functional.mse_loss(call(x), y))
            engine.step()


def train_and_tell_draws(config: dict[str, Any]) -> None:
    """What the random stream of each weighted forward pass gives, as dropout draws it."""
    engine, loader = build(config)
    draws: list[float] = []
    engine.module.dropout.register_forward_pre_hook(lambda *_: draws.append(float(torch.rand(()))))
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
    crew.told.update(draws=draws)


def train_with_more_after_each_step(config: dict[str, Any]) -> None:
    """What people do between engine.step() and the next batch: an average of the weights, clipped weights, a counter;
    and a figure after each epoch."""
    model = Small(0.1)
    model.register_buffer("average", torch.zeros_like(model.second.weight))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=Numbers(37, torch.float32),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        config=deepspeed_config(config),
    )
    before = elastic.get_context().step
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
            if elastic.get_context().step == before:
                continue
            before += 1
            with torch.no_grad():
                if config["stage"] == 0:
                    model.second.weight.clamp_(-0.05, 0.05)
                model.average.mul_(0.5).add_(model.second.weight, alpha=0.5)
            elastic.state["counter"] = elastic.state.get("counter", 0) + 1
            if before == config.get("leave_after"):
                return
        elastic.state["epochs"] = elastic.state.get("epochs", 0) + 1
    crew.told.update(
        average=model.average.tolist(), weights=model.second.weight.tolist(), state=dict(elastic.state), step=before
    )


def evaluate(engine: Any, x: torch.Tensor) -> None:
    engine.eval()
    with torch.no_grad():
        dist.all_reduce(engine(x).float().mean())
    engine.train()


def train_in_loop(config: dict[str, Any]) -> None:
    """Holds on to everything that a loop may hold. Rank `config["victim"]` stays in step `config["at"]` for ever."""
    crew.told["calls"] = crew.told.get("calls", 0) + 1
    model = Small(config["dropout"])
    held = dict(model.named_parameters())
    made = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine, optimizer, loader, scheduler = elastic.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=made,
        training_data=Numbers(37, torch.float32),
        num_workers=config.get("num_workers", 0),
        **of_engine(config, made),
    )
    sharded = config.get("engine") == "fsdp2"
    if sharded:
        held = dict(model.named_parameters())
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    passed: dict[str, Any] = {"abandoned": 0, "world sizes": [], "readers": []}
    for _ in elastic.epochs():
        for x, y in loader:
            context = elastic.get_context()
            if passed["world sizes"][-1:] != [context.world_size]:
                passed["world sizes"].append(context.world_size)
                passed["readers"].append({child.pid for child in multiprocessing.active_children()})
            assert engine.module is model
            assert model.training
            assert all(parameter is held[name] for name, parameter in model.named_parameters())
            assert [group["lr"] for group in optimizer.param_groups] == engine.get_lr()
            assert context.step == (scheduler.last_epoch if sharded else scheduler.last_batch_iteration + 1)
            last = engine.is_gradient_accumulation_boundary()
            at_fault = config.get("at") == context.step and passed["world sizes"] == [3] and last
            if config.get("again") and passed["world sizes"] == [3, 2] and "again" not in passed:
                passed["again"] = context.step
                crew.point("there again")
                if context.rank == 1:
                    crew.stay()
            with elastic.step() if config.get("strict") else nullcontext():
                for name in (
                    "forward",
                    "backward",
                    "step",
                    *(["evaluation"] if config.get("evaluates") and last else []),
                ):
                    if at_fault and config["where"] == name:
                        crew.point("there")
                        if context.rank == config["victim"]:
                            crew.stay()
                    if name == "forward":
                        output = engine(x)
                        assert output.isfinite().all()
                        loss = nn.functional.mse_loss(output, y)
                    elif name == "backward":
                        engine.backward(loss)
                    elif name == "step":
                        engine.step()
                    else:
                        evaluate(engine, x)
            abandoned = elastic.get_context().abandoned
            assert not (last and made._optimizer_step_pre_hooks) or abandoned, "the platform's, of every generation"
            passed["abandoned"] += abandoned
            elastic.report(rank=context.rank)
    crew.told.update(passed, starts=elastic.state["starts"])


class Average:
    """An average of the weights outside of the model, as many libraries have it."""

    def __init__(self, module: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in module.named_parameters()}

    def update(self, module: nn.Module) -> None:
        for name, value in module.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def train_with_own_objects(config: dict[str, Any]) -> None:
    """A scheduler that the function steps by itself and nobody knows of, and registered: an average of the weights that
    lies outside of the model, and a random generator that decides about each step. `config["late"]`: they are made
    after elastic.initialize."""
    model = Small(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def made() -> tuple[Any, Average, torch.Generator]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        average, generator = Average(model), torch.Generator().manual_seed(5)
        if config.get("register", True):
            elastic.state.register(average=average, generator=generator)
        return scheduler, average, generator

    late = config.get("late", False)
    scheduler, average, generator = (None, None, None) if late else made()
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=Numbers(37, torch.float32),
        optimizer=optimizer,
        config=deepspeed_config({**config, "schedule": False}),
    )
    if late:
        scheduler, average, generator = made()
    assert scheduler is not None
    assert average is not None
    before, draws = elastic.get_context().step, []
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
            if elastic.get_context().step > before:
                before += 1
                scheduler.step()
                average.update(engine.module)
                draws.append(float(torch.rand((), generator=generator)))
    crew.told.update(
        shadow={name: value.tolist() for name, value in average.shadow.items()},
        lr=optimizer.param_groups[0]["lr"],
        draws=draws,
        weights=model.second.weight.tolist(),
    )


def train_and_tell(config: dict[str, Any]) -> None:
    """Epoch by epoch, with evaluation between steps, metrics, and what a user may ask the engine."""
    engine, loader = build(config)
    context = elastic.get_context()
    crew.told.update(context=context, length=len(loader), steps=loader.steps)
    batches = 0
    for epoch in loader.epochs():
        for batch in epoch:
            batches += 1
            engine.eval()
            with torch.no_grad():
                engine(batch[0])
            engine.train()
            one_pass(engine, batch)
        elastic.report(epoch_ended=loader.epoch)
    crew.told.update(
        batches=batches,
        passes=float(engine.module.passes),
        weights={name: value.detach().clone() for name, value in engine.module.named_parameters()},
        global_samples=engine.global_samples,
        global_steps=engine.global_steps,
        train_batch_size=engine.train_batch_size(),
        device=str(engine.device),
        local_rank=engine.local_rank,
    )


def train_on_a_bad_sample(config: dict[str, Any]) -> None:
    """`config["bad"]` is a dataset index, `config["how"]` what goes wrong in the loss over a batch that holds it."""
    engine, loader = build(config)
    for _ in elastic.epochs():
        for x, y in loader:
            bad = config["bad"] in crew.indices[-len(x) :]
            out = engine(x)
            loss = nn.functional.mse_loss(out.float(), y.float())
            engine.backward(_GONE_WRONG[config["how"]](loss, out) if bad else loss)
            engine.step()
    crew.told.update(
        weights={name: value.detach().clone() for name, value in engine.module.named_parameters()},
        skipped_steps=engine.skipped_steps,
        global_steps=engine.global_steps,
        lr=engine.get_lr(),
    )


_GONE_WRONG = {
    "nan": lambda loss, out: loss * float("nan"),
    "inf": lambda loss, out: loss / 0.0,
    # The loss is non-finite, its gradient is finite.
    "constant": lambda loss, out: loss + float("inf"),
    # The other way round: the derivative of a root at zero.
    "gradient": lambda loss, out: loss + torch.sqrt((out.float() * 0.0).sum().abs()),
}


def train_with_a_slow_rank(config: dict[str, Any]) -> None:
    """Rank `config["slow"]` is busy for `config["busy_s"]` with every micro-batch."""
    engine, loader = build(config)
    for _ in elastic.epochs():
        for batch in loader:
            if elastic.get_context().rank == config["slow"]:
                until = time.perf_counter() + config["busy_s"]
                while time.perf_counter() < until:
                    pass
            one_pass(engine, batch)


def train_and_tell_the_backend(config: dict[str, Any]) -> None:
    from deepspeed.comm import comm

    before = type(comm.cdb).__name__
    engine, loader = build(config)
    crew.told.update(before=before, inside=[type(comm.cdb).__name__, type(comm.cdb._backend).__name__])
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)


def keep_the_contract(config: dict[str, Any]) -> None:
    """No training by a user: an engine is built and asked directly, within a generation."""
    import engine_contract

    from elastic.training import context

    generation = context.current()
    assert generation is not None
    world_size = elastic.get_context().world_size
    native = {**config["native"]}
    if generation.kind.name == "deepspeed":
        native |= {"train_batch_size": 8 * world_size, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 4}
    else:
        native |= {"global_batch": 8 * world_size, "micro_batch": 4}
    resolved = generation.kind.resolve(native, generation.scope.spec)
    assert resolved.micro_steps == engine_contract.MICRO_STEPS
    engine_contract.hold(generation.kind, resolved, generation.scope.device)


def by_deepspeeds_adam(config: dict[str, Any]) -> None:
    """DeepSpeed's own Adam, in stage 0, where every rank updates all weights."""
    adam = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999]}}
    model = Small(0.0)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Numbers(37, torch.float32),
        config=deepspeed_config({"stage": 0, "schedule": False, "top": {"optimizer": adam}}),
    )
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)


def tells_what_is_owed(config: dict[str, Any]) -> None:
    """As `train`, with what error feedback holds on this rank before the first step."""
    from elastic.core.checkpoint.shares import residual_of
    from elastic.training import context

    engine, loader = build(config)
    generation = context.current()
    assert generation is not None
    assert generation.steps is not None
    kept = generation.steps._snapshots._state.shares.kept()
    crew.told["owed"] = {
        residual[1]: tensor.tolist() for name, tensor in kept.items() if (residual := residual_of(name)) is not None
    }
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)


def train_while_links_change(config: dict[str, Any]) -> None:
    """As `train`, by seconds that are given: a ring is the fastest, and from the 20th step on `hierarchical`."""
    from elastic.comm.strategies.reduction import Reduction

    def agreed(self: Reduction) -> dict[str, float]:
        fastest = "hierarchical" if self._steps > 20 else "ring"
        return {name: 1.0 if name == fastest else 2.0 for name, *_ in self._taken}

    before, Reduction._agreed = Reduction._agreed, agreed  # type: ignore[method-assign]
    try:
        train(config)
    finally:
        Reduction._agreed = before  # type: ignore[method-assign]

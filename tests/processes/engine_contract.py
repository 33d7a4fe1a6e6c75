"""What every training engine is held to, at any world size: see `elastic/engines/base.py`.

A test gives a function that builds one engine (`Build`); `hold` runs inside a generation, on every rank.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.base import Engine, EngineKind, Nonfinite, ResolvedConfig, StepOutcome, UserObjects
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import MASTER

MICRO_STEPS, RATE = 2, 0.1


class Small(nn.Module):
    """A trained layer and vector, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        scaled: torch.Tensor = self.layer(x) * self.scale
        return scaled


def batch(step: int, number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :3]).square().mean()


def build(
    kind: EngineKind, resolved: ResolvedConfig, device: torch.device, nonfinite: Nonfinite | None = None
) -> tuple[Engine, Any]:
    """An engine over SGD with momentum and a scheduler; and the scheduler."""
    model = Small()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine, _, schedules = kind.build(resolved, nonfinite, device, UserObjects(model, optimizer, scheduler))
    return engine, schedules


def one_step(engine: Engine, step: int, rank: int, spoil: float = 1.0) -> StepOutcome:
    outcome = None
    for number in range(MICRO_STEPS):
        last = number == MICRO_STEPS - 1
        loss = loss_of(lambda x, last=last: engine.forward((x,), {}, last), batch(step, number, rank))  # type: ignore[misc]
        engine.backward(loss * spoil, {})
        outcome = engine.step((), {}, consumed=8 * (step + 1))
        assert (outcome is not None) == last, "an outcome belongs to the last micro-batch, and to no other"
    assert outcome is not None
    return outcome


def expected(steps: int, world_size: int) -> tuple[nn.Module, list[float], list[float]]:
    """The model, norms and rates of plain torch over all ranks' batches."""
    model = Small()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    norms, rates = [], []
    for step in range(steps):
        parts = [loss_of(model, batch(step, n, r)) for n in range(MICRO_STEPS) for r in range(world_size)]
        torch.stack(parts).mean().backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return model, norms, rates


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    """Every trained parameter by name, put together from the masters of all ranks. Collective."""
    state = engine.state()
    shapes = {spec.name: spec.shape for spec in state.specs() if spec.kind == MASTER}
    found = {name: torch.zeros(shape).flatten() for name, shape in shapes.items()}
    for master in state.masters():
        flat = master.tensor.detach().flatten().cpu()
        for chunk in master.chunks:
            found[chunk.name][chunk.start : chunk.stop] = flat[chunk.offset : chunk.offset + chunk.numel]
    copied = all(master.replicated for master in state.masters())
    copies = len(state.writers or range(state.world_size)) if copied else 1
    for value in found.values():
        torch.distributed.all_reduce(value, group=engine.data_group)
        value /= copies
    return {name: value.view(shapes[name]) for name, value in found.items()}


def hold(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    trains_as_plain_torch_does(kind, resolved, device)
    answers_what_loops_ask(kind, resolved, device)
    leaves_get_each_micro_batchs_own_gradient(kind, resolved, device)
    sums_of_a_step_outlive_their_engine(kind, resolved, device)
    state_covers_the_model(kind, resolved, device)
    extra_state_goes_round(kind, resolved, device)
    a_non_finite_step_is_not_applied(kind, resolved, device)
    nothing_outlives_close(kind, resolved, device)
    another_is_built_on_the_same_model(kind, resolved, device)


def trains_as_plain_torch_does(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    engine, _ = build(kind, resolved, device, "rollback")
    rank, world_size = torch.distributed.get_rank(engine.data_group), torch.distributed.get_world_size()
    model, norms, rates = expected(3, world_size)
    outcomes = [one_step(engine, step, rank) for step in range(3)]
    assert all(outcome.applied for outcome in outcomes)
    for outcome, norm, rate in zip(outcomes, norms, rates, strict=True):
        assert outcome.grad_norm is not None
        torch.testing.assert_close(float(outcome.grad_norm), norm, rtol=1e-4, atol=1e-6)
        assert outcome.learning_rates == (rate,), "the rates of the groups are those after the step"
    wanted = dict(model.named_parameters())
    for name, value in whole(engine).items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-4, atol=1e-5)
    before = float(engine.module.seen)  # type: ignore[arg-type]
    engine.module.eval()
    engine.forward((batch(9, 0, rank),), {}, None)
    engine.module.train()
    assert float(engine.module.seen) == before == 3 * MICRO_STEPS  # type: ignore[arg-type]
    assert one_step(engine, 3, rank).applied, "an evaluation pass is not part of a step"
    engine.close()


def answers_what_loops_ask(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    """By the names that DeepSpeed gave it: a loop need not know which engine it has."""
    engine, _ = build(kind, resolved, device)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    one_step(engine, 0, rank)
    native = engine.native
    assert (torch.device(native.device), native.local_rank) == (device, 0)
    assert (native.global_rank, native.world_size, native.global_steps) == (rank, world_size, 1)
    assert native.train_micro_batch_size_per_gpu() == resolved.micro_batch
    assert (native.gradient_accumulation_steps(), native.skipped_steps) == (MICRO_STEPS, 0)
    assert native.gradient_clipping() == resolved.native["gradient_clipping"]
    assert native.get_lr() == [group["lr"] for group in native.optimizer.param_groups]
    assert native.layer is native.module.layer, "what the model has is the engine's"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = native.nothing_like_it
    native.zero_grad()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in native.module.parameters())
    engine.close()


def sums_of_a_step_outlive_their_engine(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    """The last micro-batch of a step is computed by another engine than the first ones."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, (norm,), _ = expected(1, world_size)
    first, _ = build(kind, resolved, device)
    if isinstance(first.sums, str):
        assert first.sums
        first.close()
        return
    for number in range(MICRO_STEPS - 1):
        first.backward(loss_of(lambda x: first.forward((x,), {}, False), batch(0, number, rank)), {})
        first.step((), {}, consumed=8)
    taken = first.sums.take()
    assert taken.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert first.sums.take() == {}, "the engine has them no more"
    first.close()
    other, _ = build(kind, resolved, device, "rollback")
    assert not isinstance(other.sums, str)
    met: list[int] = []
    other.sums.before_reduction(lambda: met.append(1))
    loss = loss_of(lambda x: other.forward((x,), {}, True), batch(0, MICRO_STEPS - 1, rank))
    other.sums.add(taken)
    other.backward(loss, {})
    assert met == [1]
    outcome = other.step((), {}, consumed=8)
    assert outcome is not None
    assert outcome.grad_norm is not None
    torch.testing.assert_close(float(outcome.grad_norm), norm, rtol=1e-4, atol=1e-6)
    wanted = dict(model.named_parameters())
    for name, value in whole(other).items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-4, atol=1e-5)
    other.close()


def leaves_get_each_micro_batchs_own_gradient(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    engine, _ = build(kind, resolved, device)
    rank = torch.distributed.get_rank()
    found: dict[str, torch.Tensor] = {}

    def reader(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: found.update({name: gradient.detach().cpu().clone()})

    for number in range(MICRO_STEPS):
        found.clear()
        last = number == MICRO_STEPS - 1
        loss = loss_of(lambda x, last=last: engine.forward((x,), {}, last), batch(0, number, rank))  # type: ignore[misc]
        hooks: list[Any] = [leaf.register_hook(reader(name)) for name, leaf in engine.leaves().items()]  # type: ignore[no-untyped-call]
        engine.backward(loss, {})
        engine.step((), {}, consumed=8)
        for hook in hooks:
            hook.remove()
        model = Small()
        loss_of(model, batch(0, number, rank)).backward()  # type: ignore[no-untyped-call]
        trained = {name: p.grad / MICRO_STEPS for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == trained.keys()
        for name, gradient in trained.items():
            torch.testing.assert_close(found[name], gradient)
    engine.close()


def state_covers_the_model(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    engine, _ = build(kind, resolved, device)
    state = engine.state()
    one_step(engine, 0, state.rank)
    state.require_readable()
    specs = {spec.name: spec for spec in state.specs()}
    assert list(specs) == ["scale", "frozen", "layer.weight", "layer.bias", "seen"]
    assert specs["layer.weight"].shape == (3, 5), "shapes are those before the engine partitions"
    assert {name for group in state.groups() for name in group} == {"scale", "layer.weight", "layer.bias"}
    counts = {name: torch.zeros(spec.numel) for name, spec in specs.items()}
    for chunk in Inventory.of(state).written(state.rank, state.world_size, state.writers).chunks:
        counts[chunk.name][chunk.start : chunk.stop] += 1
    for name, count in counts.items():
        torch.distributed.all_reduce(count, group=engine.data_group)
        assert count.eq(1).all(), f"the ranks' snapshots do not have each element of {name} once"
    # Installing what is there changes nothing, and the model's own weights follow from the masters.
    before = whole(engine)
    state.begin_install()
    for master in state.masters():
        master.tensor.detach().mul_(2.0)
    state.finish_install()
    for name, value in whole(engine).items():
        assert torch.equal(value, 2 * before[name])
    for weight in state.weights():
        own = before[weight.name].flatten()[weight.start : weight.start + weight.tensor.numel()]
        assert torch.equal(weight.tensor.detach().cpu(), 2 * own), f"{weight.name} does not follow its master"
    engine.close()


def extra_state_goes_round(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    used, schedule = build(kind, resolved, device)
    rank = torch.distributed.get_rank(used.data_group)
    for step in range(2):
        one_step(used, step, rank)
    saved = json.loads(json.dumps(used.extra_state(), allow_nan=False))
    assert saved.keys() == {"engine", "loss_scaler", "modules", "scheduler"}
    assert saved["scheduler"]["state"]["last_epoch"] == schedule.last_epoch == 2
    used.close()
    fresh, _ = build(kind, resolved, device)
    wanted = fresh.expected_extra_state(saved)
    assert fresh.extra_state() != wanted, "a fresh engine is taken for a restored one"
    fresh.load_extra_state(saved)
    assert fresh.extra_state() == wanted
    fresh.close()


def a_non_finite_step_is_not_applied(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    try:
        engine, _ = build(kind, resolved, device, "skip")
    except UsageError:
        return
    rank = torch.distributed.get_rank(engine.data_group)
    assert one_step(engine, 0, rank).applied
    before, extra = whole(engine), engine.extra_state()
    # On one rank only: all must know.
    outcome = one_step(engine, 1, rank, spoil=float("nan") if rank == 0 else 1.0)
    assert not outcome.applied
    assert outcome.grad_norm is not None
    assert not 0.0 <= float(outcome.grad_norm) < float("inf")
    for name, value in whole(engine).items():
        assert torch.equal(value, before[name]), f"{name} has changed"
    assert engine.extra_state()["scheduler"] == extra["scheduler"], "a step that was skipped moves no schedule"
    assert one_step(engine, 2, rank).applied
    engine.close()


def nothing_outlives_close(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    engine, schedule = build(kind, resolved, device)
    one_step(engine, 0, torch.distributed.get_rank(engine.data_group))
    native = weakref.ref(engine.native)
    engine.close()
    engine.close()
    del schedule
    gc.collect()
    gc.collect()
    assert native() is None, "something keeps the engine alive"


def another_is_built_on_the_same_model(kind: EngineKind, resolved: ResolvedConfig, device: torch.device) -> None:
    """What the user holds stays: model, parameters, optimizer, hooks, and a loss with its graph."""
    model = Small()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)
    calls: list[int] = []
    model.layer.register_forward_hook(lambda *_: calls.append(1))
    held = dict(model.named_parameters()), [group["params"] for group in optimizer.param_groups]
    marks = _marks(model)
    for number in range(3):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        # What is built again is given the values that are restored.
        begins = replace(resolved, begins=number == 0)
        engine, *_ = kind.build(begins, "rollback", device, UserObjects(model, optimizer, scheduler))
        if kind.name == "fsdp2" and number == 0:
            # Sharding replaces the parameters, once.
            held = dict(model.named_parameters()), [list(group["params"]) for group in optimizer.param_groups]
        if kind.name == "fsdp2":
            assert all(parameter is held[0][name] for name, parameter in model.named_parameters())
        _install(engine, Small())
        rank, world_size = torch.distributed.get_rank(engine.data_group), torch.distributed.get_world_size()
        wanted, norms, rates = expected(2, world_size)
        for step, (norm, rate) in enumerate(zip(norms, rates, strict=True)):
            outcome = one_step(engine, step, rank)
            assert outcome.grad_norm is not None
            torch.testing.assert_close(float(outcome.grad_norm), norm, rtol=1e-4, atol=1e-6)
            assert outcome.learning_rates == (rate,)
        model.layer.register_buffer("late", torch.ones(()))
        for name, value in whole(engine).items():
            torch.testing.assert_close(value, dict(wanted.named_parameters())[name].detach(), rtol=1e-4, atol=1e-5)
        assert len(calls) == 2 * MICRO_STEPS
        calls.clear()
        # The step that is abandoned: gradients were added up, and the user holds output and loss.
        output = engine.forward((batch(5, 0, rank),), {}, False)
        loss = output.square().mean()
        engine.backward(loss, {})
        calls.clear()
        native = weakref.ref(engine.native)
        if engine.obstacle() is not None:
            engine.detach()
            return
        engine.detach()
        gc.collect()
        assert not vars(native()) if native() is not None else True, "something keeps the engine's shards alive"
        assert "late" in model.layer._buffers, "what the user added is gone"
        del model.layer.late
        for now, before in zip(_marks(model), marks, strict=True):
            assert now == before, f"something of the engine is left on the model: {now}, not {before}"
        if kind.name != "fsdp2":
            assert all(parameter is held[0][name] for name, parameter in model.named_parameters())
        assert [group["params"] for group in optimizer.param_groups] == held[1]
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == RATE


def _marks(model: nn.Module) -> list[Any]:
    """Everything about a model but values and what is called differently after it was shown once."""
    modules = [
        (type(module), sorted(set(vars(module)) - {"_is_full_backward_hook"}), type(module._parameters),
         {name: len(value) for name, value in vars(module).items() if "_hooks" in name})
        for module in model.modules()
    ]  # fmt: skip
    return modules + [(dict(vars(p)), tuple(p.shape), p.dtype, p.requires_grad, p.grad) for p in model.parameters()]


@torch.no_grad()
def _install(engine: Engine, model: nn.Module) -> None:
    """The values of `model` as the engine's masters."""
    values, state = {name: value.detach().flatten() for name, value in model.named_parameters()}, engine.state()
    state.begin_install()
    for master in state.masters():
        for chunk in master.chunks:
            part = values[chunk.name][chunk.start : chunk.stop]
            master.tensor.view(-1)[chunk.offset : chunk.offset + chunk.numel].copy_(part)
    state.finish_install()

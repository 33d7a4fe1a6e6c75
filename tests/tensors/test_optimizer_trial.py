"""Optimizers whose result would depend on where ZeRO cuts: refused at the start, by name or by a trial."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.json_values import decode, encode
from elastic.engines.optimizer.other_shapes import is_other, put_together, taken_apart
from elastic.engines.optimizer.trial import try_optimizer

Parameters = Iterable[torch.nn.Parameter]


class Plain(torch.optim.Optimizer):
    """Elementwise, with momentum, and a list of parameters of its own, as fused optimizers keep one."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.mine:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                state["step"] = state.get("step", 0) + 1
                p.sub_(state["momentum"] * group["lr"])


class ByNorm(Plain):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * p.norm() / p.grad.norm())


class Noisy(Plain):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(torch.randn_like(p) * group["lr"])


class InBlocks(Plain):
    """As 8-bit optimizers do: one scale for each 256 values, from 4,096 values on."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for p, state in self.state.items():
            if p.numel() >= 4096:
                state["scales"] = torch.ones(math.ceil(p.numel() / 256))


class Wrapped(Plain):
    """An optimizer around another, as Lookahead is."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        parameters = list(params)
        super().__init__(parameters, lr)
        self.inner = Plain(parameters, lr)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


class Stuck(Plain):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        raise RuntimeError("needs a device")


def _flats(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.arange(size, dtype=torch.float32)) for size in sizes]


def Lamb(params: Parameters) -> torch.optim.Optimizer:
    return type("Lamb", (Plain,), {})(params)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Lamb, "optimizer Lamb cannot be used with ZeRO stages 1 to 3 here: its step is scaled by the norm"),
        (torch.optim.Adafactor, "Adafactor cannot be used with ZeRO stages 1 to 3 here: it factors each matrix"),
        (ByNorm, "ByNorm cannot be used.*gave another result when the tensor was cut in two.*use AdamW"),
        (Noisy, "Noisy cannot be used.*gave another result when the tensor was cut in two"),
        (InBlocks, "InBlocks keeps 'scales' as 47 elements for a tensor of 12007 elements"),
        (Stuck, r"Stuck could not be tried on a toy tensor \(RuntimeError: needs a device\)"),
    ],
)
def test_what_looks_at_a_whole_tensor_is_refused_where_tensors_are_cut(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        try_optimizer(make(_flats(64)), partitioned=True)


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        Wrapped,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        # A subclass is not taken on trust, nor an optimizer that begins at a learning rate of zero.
        lambda p: type("MyAdam", (torch.optim.AdamW,), {})(p, lr=0.0),
        lambda p: type("MyAdagrad", (torch.optim.Adagrad,), {})(p, initial_accumulator_value=0.1),
        lambda p: type("MyTensorLr", (torch.optim.Adam,), {})(p, lr=torch.tensor(0.0)),
    ],
)
def test_what_updates_every_weight_by_itself_is_taken_and_left_as_it_was(make: Any) -> None:
    flats = _flats(64, 7)
    optimizer = make(
        [{"params": flats[:1]}, {"params": flats[1:], "weight_decay": 0.1}] if make is not Wrapped else flats
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    before = (torch.get_rng_state(), [p.detach().clone() for p in flats], str(optimizer.state_dict()))
    try_optimizer(optimizer, partitioned=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert all(torch.equal(p, was) for p, was in zip(flats, before[1], strict=True))
    assert all(p.grad is None for p in flats)
    assert str(optimizer.state_dict()) == before[2]
    assert hooked == []
    assert scheduler.optimizer is optimizer


def test_whole_tensors_may_be_looked_at_in_stage_0_where_nothing_is_cut() -> None:
    matrices = [torch.nn.Parameter(torch.ones(8, 4))]
    for make in (ByNorm, Lamb, Noisy, Stuck):
        assert try_optimizer(make(matrices), partitioned=False) == set()
    assert try_optimizer(torch.optim.Adafactor(matrices), partitioned=False) == {"row_var", "col_var"}
    with pytest.raises(UsageError, match="Projecting keeps 'projector' as a object for a tensor of 32 elements"):
        try_optimizer(Projecting(matrices), partitioned=False)


class Counting(Plain):
    """Of its own: a worker that joins would begin at zero."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step(closure)


@pytest.mark.parametrize("partitioned", [True, False])
def test_what_counts_in_an_attribute_is_refused(partitioned: bool) -> None:
    with pytest.raises(UsageError, match="Counting cannot be used here: its step changes count, an attribute that"):
        try_optimizer(Counting(_flats(64)), partitioned=partitioned)


class Beginning(Plain):
    """As bitsandbytes' optimizers: a flag says that they have begun."""

    begun = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begun = True
        super().step(closure)


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_flag_is_no_count(partitioned: bool) -> None:
    assert try_optimizer(Beginning(_flats(64)), partitioned=partitioned) == set()


class Measuring(Plain):
    """Adapts its rate to the sum of all gradients, some steps later."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + sum(float(p.grad.norm()) for p in self.mine if p.grad is not None)
        super().step(closure)


class KeepingNorm(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in (p for p in self.mine if p.grad is not None):
            self.state[p]["norm"] = p.grad.norm()


class Late(Plain):
    """As RAdam: the first steps change nothing; then it looks at the whole tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in (p for p in self.mine if p.grad is not None and group["step"] > 5):
                p.sub_(p.grad / p.grad.norm())


@pytest.mark.parametrize("kind", [Measuring, KeepingNorm, Late])
def test_what_looks_at_whole_tensors_later_is_found(kind: type[Plain]) -> None:
    with pytest.raises(UsageError, match="another result when the tensor was cut"):
        try_optimizer(kind(_flats(64)), partitioned=True)


class Projecting(ByNorm):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["projector"] = object()


def test_what_has_other_shapes_is_taken_apart_and_put_together() -> None:
    like = torch.zeros(3, 2)
    rows, square = torch.arange(3.0), torch.ones(2, 2, dtype=torch.bfloat16)
    for value in (rows, [square, None, []], {"rows": rows, "more": (square,)}):
        assert is_other(value, like)
        places, tensors = taken_apart("key", value)
        assert json.loads(json.dumps(encode(places, "key"))) == encode(places, "key"), "it can be written"
        stored = {path: tensor.clone().reshape(-1) for path, tensor in tensors.items()}
        back = put_together(
            decode(encode(places, "key")), lambda path, shape, dtype, found=stored: found[path].view(shape)
        )
        again, same = taken_apart("key", back)
        assert (again, type(back)) == (places, type(value))
        assert all(torch.equal(same[path], tensor) for path, tensor in tensors.items())
    with pytest.raises(UsageError, match=r"two tensors of a parameter under 'key\.a\.b'"):
        taken_apart("key", {"a.b": rows, "a": {"b": rows}})
    for value in (like, torch.ones(1), 3, "text", None, [1, rows], object()):
        assert not is_other(value, like), "of the parameter's shape, a number, or not to be carried"


@pytest.mark.parametrize(("kind", "refused"), [(Plain, False), (ByNorm, True)])
def test_groups_that_are_filled_during_a_step_only_are_tried(kind: type[Plain], refused: bool) -> None:
    """As under stage 3: the flat of the group is known to the engine, not to the optimizer."""
    flat = torch.nn.Parameter(torch.ones(8))
    optimizer = kind([flat])
    optimizer.param_groups[0]["params"] = []
    if not refused:
        try_optimizer(optimizer, True, {0: flat})
        return
    with pytest.raises(UsageError, match="cut in two"):
        try_optimizer(optimizer, True, {0: flat})


class Dealt(torch.optim.SGD):
    """Ranks step parameters in turn, and send them to the others. `kept_by`: the ranks that have a state of it then."""

    kept_by: tuple[int, ...] = (0,)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            dist.broadcast(parameter, 0)
            parameter.sub_(0.1)
            if dist.get_rank() in self.kept_by:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)


class Alike(Dealt):
    kept_by = (0, 1)


def _tried(rank: int, store: str, told: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in (Dealt, Alike):
        optimizer = kind([nn.Parameter(torch.ones(3, 2))], 0.1)
        # As an engine or a scheduler leaves it.
        vars(optimizer)["zero_grad"] = told.put
        try:
            try_optimizer(optimizer, partitioned=False)
        except UsageError as error:
            told.put((rank, kind.__name__, str(error)))
    dist.destroy_process_group()


def test_in_stage_0_what_deals_tensors_out_among_ranks_is_refused_on_all(tmp_path: Path) -> None:
    """State that is on one rank alone would be lost with it. Collectives that leave it on all are the script's own."""
    context = torch.multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(target=_tried, args=(rank, str(tmp_path / "store"), told)) for rank in range(2)]
    for each in ranks:
        each.start()
    refused = sorted(told.get(timeout=120) for _ in ranks)
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0, 0]
    assert [(rank, name) for rank, name, _ in refused] == [(0, "Dealt"), (1, "Dealt")]
    assert "collectives of its own (broadcast): the state of each is on one rank" in refused[0][2]
    assert told.empty()

"""Which optimizers are stepped on whole tensors, and which are refused."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.meshes import make_meshes
from elastic.engines.fsdp2.update import whole_step
from elastic.engines.fsdp2.update.optimizers import one_of
from elastic.engines.fsdp2.update.trial import try_optimizer
from elastic.engines.fsdp2.update.update import Update


def whole_groups(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return try_optimizer(optimizer).groups


class Written(torch.optim.Optimizer):
    """What `change` of the optimizer, a parameter, its state and its gradient gives is taken away."""

    def __init__(self, groups: Any, change: Callable[..., Any], **own: Any) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.change = change
        vars(self).update(own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.change(self, group, parameter, self.state[parameter]))


def _parameter(*shape: int, **marks: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    for key, value in marks.items():
        setattr(made, key, value)
    return made


def _by_norm(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    state["steps"] = state.get("steps", 0) + 1
    return parameter.grad / parameter.grad.norm()


def _by_element(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    return parameter.grad.sign()


def _by_mark(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    return (_by_norm if getattr(parameter, "whole", False) else _by_element)(own, group, parameter, state)


def _by_flag(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    return _by_norm(own, group, parameter, {}) if state["whole"] else parameter.grad


def _by_dimensions(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    return (_by_norm if parameter.dim() > 1 else _by_element)(own, group, parameter, state)


def test_groups_that_look_at_whole_tensors_are_found() -> None:
    matrix, vector = _parameter(4, 3), _parameter(5)
    assert whole_groups(torch.optim.Muon([matrix])) == {0}
    assert whole_groups(torch.optim.NAdam([matrix, vector])) == frozenset()
    assert whole_groups(torch.optim.AdamW([matrix, vector])) == frozenset()
    groups = [{"params": [vector]}, {"params": [_parameter(6), matrix]}, {"params": [_parameter()]}]
    assert whole_groups(Written(groups, _by_dimensions)) == {1}
    marked = [{"params": [vector, _parameter(5, whole=False)]}, {"params": [_parameter(5), _parameter(5, whole=True)]}]
    assert whole_groups(Written(marked, _by_mark)) == {1}
    flagged = Written([vector, matrix], _by_flag)
    flagged.state[vector]["whole"], flagged.state[matrix]["whole"] = False, True
    assert whole_groups(flagged) == {0}


def test_nothing_of_the_optimizer_or_the_run_changes() -> None:
    matrix = _parameter(4, 3)
    optimizer, before = torch.optim.Muon([matrix], lr=0.5), matrix.detach().clone()
    drawn = torch.random.get_rng_state()
    whole_groups(optimizer)
    (group,) = optimizer.param_groups
    assert (group["params"], group["lr"], dict(optimizer.state)) == ([matrix], 0.5, {})
    assert torch.equal(matrix, before)
    assert torch.equal(torch.random.get_rng_state(), drawn)


def _counts_in_its_group(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    group["steps"] = group.get("steps", 0) + 1
    return _by_norm(own, group, parameter, state)


def _counts_by_itself(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    own.counted += 1
    return _by_norm(own, group, parameter, state)


def _by_all(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    norms = [p.grad.norm() for each in own.param_groups for p in each["params"]]
    return parameter.grad / torch.stack(norms).norm()


def _keeps_an_object(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    state["projector"] = object()
    return parameter.grad / parameter.grad.norm()


def _keeps_more_later(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    state["late" if "early" in state else "early"] = 1
    return _by_norm(own, group, parameter, state)


def _reduces(own: Any, group: Any, parameter: Any, state: Any) -> Any:
    dist.all_reduce(parameter.grad)
    return _by_norm(own, group, parameter, state)


class Filling(torch.optim.Optimizer):
    """As KellerJordan/Muon has it: what has no gradient is stepped as if it were zero."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.mul_(0.9).sub_(0.1 * gradient / gradient.norm().clamp(min=1.0))


def test_what_steps_parameters_without_gradient_is_known() -> None:
    assert try_optimizer(Filling([_parameter(4, 3)])).fills
    assert not try_optimizer(torch.optim.Muon([_parameter(4, 3)])).fills


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_counts_in_its_group, r"changes param_groups\[0\]\['steps'\] by what its tensors are"),
        (_counts_by_itself, "changes counted, an attribute that is in no snapshot"),
        (_by_all, "a step of a tensor depends on others"),
        (_keeps_an_object, "keeps 'projector' as a object"),
        (_keeps_more_later, "after one step, .*'late'.* after 8"),
        (_reduces, r"collectives of its own \(allreduce"),
        (lambda *_: 1 / 0, "could not be tried on a toy tensor .ZeroDivisionError"),
        (lambda *_: 0.0, "its step changed nothing"),
    ],
)
def test_what_a_step_of_one_whole_tensor_cannot_do_is_refused(change: Callable[..., Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        whole_groups(Written([_parameter(4, 3), _parameter(6, 3)], change, counted=0))


HELD: dict[str, Callable[..., Any]] = {
    "ids": lambda p: {id(p)},
    "list": lambda p: {"all": [p]},
    "keys": lambda p: {p: 1},
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_an_optimizer_that_would_not_know_what_stands_in_is_refused(held: Callable[..., Any]) -> None:
    matrix = _parameter(4, 3)
    with pytest.raises(UsageError, match="its 'known' has parameters, or their ids, besides its groups"):
        whole_groups(Written([matrix], _by_norm, known=held(matrix)))


def test_what_looks_at_several_tensors_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="optimizer LBFGS cannot be used with the fsdp2 engine"):
        whole_groups(torch.optim.LBFGS([_parameter(4, 3)]))


def test_what_has_other_shapes_is_told() -> None:
    adafactor = torch.optim.Adafactor([_parameter(4, 3), _parameter(5)])
    assert whole_groups(adafactor) == {0}
    assert try_optimizer(adafactor).others == {"row_var", "col_var"}


def test_several_optimizers_are_one() -> None:
    matrix, vector = _parameter(4, 3), _parameter(5)
    muon, adamw = torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW([vector], lr=0.2)
    one = one_of([muon, adamw])
    assert one is one_of([muon, adamw])
    assert one_of(muon) is muon
    groups = [*muon.param_groups, *adamw.param_groups]
    assert all(group is own for group, own in zip(one.param_groups, groups, strict=True))
    matrix.grad, vector.grad = torch.ones(4, 3), torch.ones(5)
    one.step()
    assert set(one.state[matrix]) == {"momentum_buffer"}
    assert "exp_avg" in one.state[vector]
    schedule = torch.optim.lr_scheduler.LambdaLR(one, lambda step: math.pow(0.5, step))
    one.step()
    schedule.step()
    assert [muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]] == [0.05, 0.1]


def test_several_are_gone_with_their_last_holder() -> None:
    several = [torch.optim.Muon([_parameter(4, 3)]), torch.optim.AdamW([_parameter(5)])]
    one = weakref.ref(one_of(several))
    copied: Any = copy.deepcopy(several[0])
    assert not copied.state
    del several, copied
    gc.collect()
    assert one() is None


def test_several_that_cannot_be_one_are_refused() -> None:
    matrix = _parameter(4, 3)
    with pytest.raises(UsageError, match="a parameter in common"):
        one_of([torch.optim.SGD([matrix]), torch.optim.Adam([matrix])])
    with pytest.raises(UsageError, match="takes one torch optimizer or several that were made, got str"):
        one_of([torch.optim.SGD([matrix]), "adam"])
    with pytest.raises(UsageError, match="got none"):
        one_of([])


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _with_gradients(model: torch.nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        like: Any = parameter
        sharded = isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(value, like.device_mesh, like.placements) if sharded else value


@pytest.mark.usefixtures("alone")
def test_hooks_see_one_step_and_sharded_parameters() -> None:
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model, seen = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), []
        meshes = make_meshes(torch.device("cpu"), None)
        if sharded:
            fully_shard(model, mesh=meshes.dp)
        optimizer = Written(model.parameters(), _by_dimensions)
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda own, *_, seen=seen: seen.append([type(p) for g in own.param_groups for p in g["params"]]))
        assert meshes.stage is not None
        step: Any = optimizer.step
        if sharded:
            step = Update(optimizer, torch.device("cpu"), meshes.stage, dist.all_to_all_single)
        for _ in range(3):
            _with_gradients(model)
            step()
        assert seen == [[DTensor if sharded else torch.nn.Parameter] * 4] * 6
        found.append([getattr(p, "_local_tensor", p).detach() for p in model.parameters()])
        assert [optimizer.state[p].get("steps") for p in model.parameters()] == [3, None, 3, None]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("world")
def test_work_is_dealt_out_evenly_and_memory_bounds_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = make_meshes(torch.device("cpu"), None)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(6)), torch.nn.Linear(8, 16, False))
    fully_shard(model, mesh=meshes.dp)
    optimizer = torch.optim.Muon(model.parameters())
    trial = try_optimizer(optimizer)
    (everything,) = whole_step._in_rounds(optimizer, trial)
    assert [tensor.owner for tensor in everything] == [0, 1, 2, 3, 0, 1, 2]
    monkeypatch.setattr(whole_step, "_ROUND_BYTES", 8 * 8 * 4)
    rounds = [[tensor.owner for tensor in now] for now in whole_step._in_rounds(optimizer, trial)]
    assert rounds == [[0, 1, 2, 3], [0, 1, 2]]

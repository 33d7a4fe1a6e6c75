"""DeepSpeed's own layers of experts: their place in the mesh, their names, and what of them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh
from elastic.engines.base import UserObjects
from elastic.engines.deepspeed.experts.native import Counterparts, configured, layers_of, placed
from elastic.engines.deepspeed.experts.native_placed import obstacle, place_again
from elastic.engines.deepspeed.experts.native_rules import require_carriable
from elastic.engines.deepspeed.experts.optimizer import Regrouped, regrouped, require_groups
from elastic.engines.live_state import TensorSpec
from elastic.engines.model.plain_names import FIRST, named_modules, named_parameters

_LIST = "moe.deepspeed_moe.experts.deepspeed_experts"
STAGE = {"zero_optimization": {"stage": 2}}


class MoE(nn.Module):
    """As DeepSpeed's: `ep_size` ranks have `num_experts` between them."""

    def __init__(self, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, alike: bool = True) -> None:
        super().__init__()
        self.ep_size, self.num_local_experts, self.deepspeed_moe = ep_size, num_experts // ep_size, nn.Module()
        self.num_experts = num_experts
        self.deepspeed_moe.ep_group, self.deepspeed_moe.use_tutel = None, False
        self.deepspeed_moe.experts = nn.Module()
        made = [expert, *(nn.Linear(2, 3 if alike else 4) for _ in range(self.num_local_experts - 1))]
        self.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(made)
        for parameter in self.deepspeed_moe.experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]


MoE.__module__ = "deepspeed.moe.layer"


class Model(nn.Module):
    def __init__(self, expert: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(1, 2)
        self.moe = MoE(expert or nn.Linear(2, 3), **{"num_experts": 4, "ep_size": 2, **options})
        self.last = nn.Linear(3, 1)


def shared(ep: int, **section: Any) -> dict[str, Any]:
    return {**STAGE, "expert_parallel": {"enabled": True, "autoep_size": ep, **section}}


def test_the_size_follows_from_the_mesh() -> None:
    given: dict[str, Any] = {}

    def original(self: Any, expert: Any, num_experts: int = 1, ep_size: int = 1) -> None:
        given.update(num_experts=num_experts, ep_size=ep_size)

    placed(original, None, (None, 4), {}, Mesh(2, ep=2))
    assert given == {"num_experts": 4, "ep_size": 2}
    placed(original, None, (None,), {"num_experts": 4, "ep_size": 1}, Mesh(2))
    assert given == {"num_experts": 4, "ep_size": 1}
    with pytest.raises(UsageError, match=r"given ep_size=2, and the job's mesh says ep: 4; .*mesh: {ep: 2}"):
        placed(original, None, (None, 4, 2), {}, Mesh(4, ep=4))
    with pytest.raises(UsageError, match="num_experts=6, and the job's mesh says ep: 4, no divisor"):
        placed(original, None, (None, 6), {}, Mesh(4, ep=4))
    with pytest.raises(UsageError, match=r"is not supported with mesh: {sp: 2}: which tokens"):
        placed(original, None, (None, 6), {}, Mesh(2, sp=2))


def test_experts_have_their_numbers_among_all() -> None:
    model = Model()
    setattr(model.moe.deepspeed_moe.experts.deepspeed_experts, FIRST, 2)
    names = [name for name, _ in named_parameters(model)]
    own = [f"{_LIST}.{number}.{what}" for number in (2, 3) for what in ("weight", "bias")]
    assert names == ["first.weight", "first.bias", *own, "last.weight", "last.bias"]
    modules = dict(named_modules(model))
    assert f"{_LIST}.3" in modules
    assert f"{_LIST}.0" not in modules

    counterparts = Counterparts(model)
    whole = [f"{_LIST}.{number}.{what}" for number in range(4) for what in ("weight", "bias")]
    specs = [TensorSpec(name, "master", (len(name),)) for name in names]
    found = [spec.name for spec in counterparts.of_specs(specs)]
    assert found == ["first.weight", "first.bias", *whole, "last.weight", "last.bias"], "as one rank with all has them"
    assert counterparts.of_names(names[:3]) == ["first.weight", "first.bias", f"{_LIST}.0.weight", f"{_LIST}.2.weight"]
    assert Counterparts(nn.Linear(1, 1)).of_names(["weight"]) == ["weight"]


def test_autoep_is_turned_off_for_a_model_that_has_such_layers() -> None:
    assert configured(Model(), shared(2)) == STAGE
    assert configured(nn.Linear(1, 1), shared(2)) == shared(2)
    with pytest.raises(UsageError, match=r"expert_parallel\.preset_model is for AutoEP, and the model has"):
        configured(Model(), shared(2, preset_model="mixtral"))


def tied() -> Model:
    model = Model()
    experts = model.moe.deepspeed_moe.experts.deepspeed_experts
    experts[1].weight = model.moe.deepspeed_moe.experts.deepspeed_experts[0].weight
    return model


def bound() -> Model:
    model = Model()
    model.moe.deepspeed_moe.ep_group = object()
    return model


def alone() -> nn.Module:
    gate = nn.Linear(1, 1)
    gate.__class__ = type("TopKGate", (nn.Linear,), {"__module__": "deepspeed.moe.sharded_moe"})
    return nn.Sequential(gate)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


def test_what_can_be_carried_is_not_refused() -> None:
    require_carriable(Model(), shared(2))
    require_carriable(Model(ep_size=1), STAGE)
    require_carriable(Model(nn.BatchNorm1d(2), num_experts=1, ep_size=1), STAGE)
    require_carriable(nn.Linear(1, 1), {})
    assert list(layers_of(Model())) == ["moe"]


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (Model(), {**shared(2), "zero_optimization": {"stage": 3}}, "stages 1 and 2, and zero_optimization.stage is 3"),
        (Model(), {**shared(2), "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype: not run"),
        (Model(), STAGE, "'moe' was built outside of this generation, for ep_size=2, and the job's mesh says ep: 1"),
        (bound(), shared(2), "build the model anew in the training function, without elastic.keep"),
        (Model(alike=False), shared(2), "the experts of the MoE layer 'moe' are not alike"),
        (Model(Model()), shared(2), "an expert of the MoE layer 'moe' has such a layer inside"),
        (Model(nn.BatchNorm1d(2), num_experts=2), shared(2), r"has buffers, .* \(running_mean\)"),
        (Model(nn.Linear(2, 3).requires_grad_(False), num_experts=2), shared(2), r"has frozen parameters \(weight\)"),
        (Model(Extra(2, 3)), shared(2), r"has extra state \(Extra\)"),
        (tied(), shared(2), r"shares a tensor with another module \(moe.*experts.1.weight\)"),
        (alone(), STAGE, "TopKGate of deepspeed.moe.sharded_moe is supported within a layer"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(model: nn.Module, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_carriable(model, config)


def test_groups_that_the_script_has_split_stay() -> None:
    model = Model()
    experts = list(model.moe.parameters())
    dense = [*model.first.parameters(), *model.last.parameters()]
    split = torch.optim.SGD([{"params": dense}, {"params": experts, "moe": True, "name": "ep_size_2"}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(split, 1)
    require_groups(UserObjects(model, split, schedule), native=True, ep_changes=True)
    assert regrouped(UserObjects(model, split), native=True) is split

    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert isinstance(regrouped(UserObjects(model, plain), native=True), Regrouped)
    with pytest.raises(UsageError, match="StepLR was made before the experts had parameter groups"):
        require_groups(
            UserObjects(model, plain, torch.optim.lr_scheduler.StepLR(plain, 1)), native=True, ep_changes=True
        )
    some = torch.optim.SGD([{"params": [*dense, experts[0]]}, {"params": experts[1:], "moe": True}], lr=0.1)
    with pytest.raises(UsageError, match="some experts are in parameter groups of their own"):
        require_groups(UserObjects(model, some), native=True, ep_changes=True)


def test_groups_whose_number_depends_on_who_shares_experts_are_refused() -> None:
    model = Model(nn.Linear(10_000, 10_000, bias=False, device="meta"), num_experts=2)
    again = nn.Parameter(torch.empty(10_000, 10_000, device="meta"))
    again.allreduce = False  # type: ignore[attr-defined]
    (expert,) = model.moe.parameters()
    more = {"moe": True, "name": "ep_size_2"}
    cut = torch.optim.SGD([{"params": [expert], **more}, {"params": [again], **more}], lr=0.1)
    with pytest.raises(UsageError, match="the experts' parameters are in 2 groups by size"):
        require_groups(UserObjects(model, cut), native=True, ep_changes=True)
    require_groups(UserObjects(model, cut), native=True, ep_changes=False)
    other = torch.optim.SGD([{"params": [expert], **more}, {"params": [again], "weight_decay": 0.1, **more}], lr=0.1)
    require_groups(UserObjects(model, other), native=True, ep_changes=True)


def test_layers_get_the_experts_of_another_mesh_in_the_groups_of_the_former_ones() -> None:
    model = Model(ep_size=2)
    weights, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    among = [{id(p) for p in model.moe.parameters()}]
    groups = [
        {"params": [p for p in own if (id(p) in among[0]) == moe], "weight_decay": decay}
        | ({"moe": True, "name": "ep_size_2"} if moe else {})
        for own, decay in ((weights, 0.1), (biases, 0.0))
        for moe in (False, True)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    objects = UserObjects(model, optimizer)
    before = list(model.moe.deepspeed_moe.experts.deepspeed_experts)
    assert obstacle(model, objects) is None
    assert place_again(model, objects, 2) is objects
    for ep, count in ((1, 4), (4, 1), (2, 2)):
        place_again(model, objects, ep)
        experts = model.moe.deepspeed_moe.experts.deepspeed_experts
        assert len(experts) == count == model.moe.num_local_experts
        assert all(one is other for one, other in zip(experts, before[:1], strict=False))
        assert all(not p.allreduce and p.group_name == f"ep_size_{ep}" for p in experts.parameters())
        dense, moe, dense_biases, moe_biases = (group["params"] for group in optimizer.param_groups)
        assert [id(p) for p in moe] == [id(expert.weight) for expert in experts]
        assert [id(p) for p in moe_biases] == [id(expert.bias) for expert in experts]
        assert (len(dense), len(dense_biases)) == (2, 2)
        assert [group.get("name") for group in optimizer.param_groups] == [None, f"ep_size_{ep}"] * 2
        assert obstacle(model, objects) is None
    listed = UserObjects(model, None, model_parameters=list(model.parameters()))
    found = place_again(model, listed, 1).model_parameters
    assert found is not None
    assert [id(p) for p in found] == [id(p) for p in model.parameters()]


def _hooked(model: Model) -> None:
    model.moe.deepspeed_moe.experts.deepspeed_experts[1].register_forward_hook(lambda *_: None)


def _numbered(model: Model) -> None:
    for number, expert in enumerate(model.moe.deepspeed_moe.experts.deepspeed_experts):
        expert.number = number


def _apart(model: Model) -> list[Any]:
    one, other = model.moe.deepspeed_moe.experts.deepspeed_experts
    rest = [*model.first.parameters(), *one.parameters(), *model.last.parameters()]
    return [{"params": rest}, {"params": list(other.parameters())}]


@pytest.mark.parametrize(
    ("change", "groups", "said"),
    [
        (_hooked, None, "it has put hooks on experts"),
        (_numbered, None, "it has given the experts of one layer different attributes"),
        (None, _apart, "its parameter groups have experts of one layer apart, or in another order"),
        (None, lambda model: list(model.parameters())[::-1], "or in another order than the model has"),
    ],
)
def test_what_cannot_be_placed_for_another_mesh_is_named(change: Any, groups: Any, said: str) -> None:
    model = Model(ep_size=2)
    if change is not None:
        change(model)
    given = model.parameters() if groups is None else groups(model)
    objects = UserObjects(model, torch.optim.SGD(given, lr=0.1))
    assert said in (obstacle(model, objects) or "")
    with pytest.raises(UsageError, match=f"outside of this generation, for another mesh.ep than 1, and .*{said}"):
        place_again(model, objects, 1)

"""Saved names are those of the model without wrappers, however much of it is compiled or recomputed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from elastic.engines.model import plain_names
from elastic.engines.model.description import describe


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Embedding(2, 2))
    made[1][0].weight = made[0].weight
    return made


def compiled() -> nn.Module:
    """A part, a part of which is compiled too, and the whole; another part is recomputed beforehand."""
    made = model()
    made[0] = torch.compile(checkpoint_wrapper(made[0]), backend="eager")  # type: ignore[no-untyped-call]
    made[2] = checkpoint_wrapper(made[2])  # type: ignore[no-untyped-call]
    made[1][1] = torch.compile(made[1][1], backend="eager")
    made[1] = torch.compile(made[1], backend="eager")
    whole: nn.Module = torch.compile(made, backend="eager")  # type: ignore[assignment]
    assert "_orig_mod.1._orig_mod.1._orig_mod.weight" in dict(whole.named_parameters())
    return whole


def test_names_are_those_of_the_plain_model_in_the_same_order() -> None:
    for duplicates in (True, False):
        assert [name for name, _ in plain_names.named_parameters(compiled(), duplicates)] == [
            name for name, _ in model().named_parameters(remove_duplicate=duplicates)
        ]
        assert [name for name, _ in plain_names.named_buffers(compiled(), duplicates)] == [
            name for name, _ in model().named_buffers(remove_duplicate=duplicates)
        ]
    assert [(name, type(module)) for name, module in plain_names.named_modules(compiled())] == [
        (name, type(module)) for name, module in model().named_modules()
    ]


def test_a_name_of_the_model_that_only_looks_alike_stays() -> None:
    assert plain_names.plain("a._orig_mod_2.b_orig_mod.weight") == "a._orig_mod_2.b_orig_mod.weight"
    assert plain_names.plain("_orig_mod") == ""


def test_the_description_is_that_of_the_plain_model() -> None:
    assert describe(compiled()) == describe(model())


def test_what_is_not_wrapped_is_itself() -> None:
    plain = model()
    assert plain_names.unwrapped(plain) is plain
    wrapped = torch.compile(checkpoint_wrapper(plain), backend="eager")  # type: ignore[no-untyped-call]
    assert plain_names.unwrapped(wrapped) is plain


def everything(module: nn.Module) -> list[tuple[str, int]]:
    named = (plain_names.named_parameters, plain_names.named_buffers, plain_names.named_modules)
    return [(name, id(found)) for look in named for name, found in look(module)]  # type: ignore[operator]


def of_torch(module: nn.Module) -> list[tuple[str, int]]:
    named = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return [(name, id(found)) for found_here in named for name, found in found_here]  # type: ignore[attr-defined]


def _replaced_elsewhere(made: Any) -> None:
    """The only reference is gone before the next one is made, which mostly lies where that did."""
    made[1][1].running_var = None
    made[1][1].running_var = torch.ones(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter that is registered later": lambda made: made[0].register_parameter(
        "more", nn.Parameter(torch.ones(1))
    ),
    "another parameter under its name": lambda made: setattr(made[0], "bias", nn.Parameter(torch.ones(2))),
    "a parameter that is gone": lambda made: setattr(made[0], "bias", None),
    "a parameter that becomes a buffer": lambda made: made[2].register_buffer(
        "weight", made[2]._parameters.pop("weight")
    ),
    "a buffer that is registered later": lambda made: made.register_buffer("mask", torch.ones(1)),
    "another buffer under its name": lambda made: setattr(made[1][1], "running_mean", torch.ones(2)),
    "another buffer in the old one's place": _replaced_elsewhere,
    "another name": lambda made: setattr(made[0], "other", made[0]._parameters.pop("bias")),
    "a module that takes over a parameter": lambda made: made[1].register_parameter(
        "bias", made[0]._parameters.pop("bias")
    ),
    "tied later": lambda made: setattr(made[1][0], "bias", made[0].bias),
    "no longer tied": lambda made: setattr(made[1][0], "weight", nn.Parameter(torch.ones(2, 2))),
    "another module under its name": lambda made: made[1].__setitem__(0, nn.Linear(2, 2)),
    "a module that is added": lambda made: made.append(nn.Linear(2, 2)),
    "a module that is gone": lambda made: made[1].__delitem__(1),
    "one module under two names": lambda made: made.append(made[0]),
    "modules in another order": lambda made: made._modules.update({"0": made._modules.pop("0")}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_names_are_those_of_the_moment(change: str) -> None:
    made = model()
    assert everything(made) == of_torch(made) == everything(made)
    before = everything(made)
    CHANGES[change](made)
    assert everything(made) == of_torch(made)
    # The names and identities are the same where a module has one more name, and may be where memory is used again.
    assert everything(made) != before or change in (
        "another buffer in the old one's place",
        "one module under two names",
    )


def test_a_part_that_is_compiled_or_numbered_later_is_seen() -> None:
    made = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))
    assert "0.0.weight" in dict(plain_names.named_parameters(made))
    setattr(made[0], plain_names.FIRST, 3)
    assert "0.3.weight" in dict(plain_names.named_parameters(made))
    before = dict(plain_names.named_modules(made))["1"]
    made[1] = torch.compile(made[1], backend="eager")
    assert dict(plain_names.named_modules(made))["1"] is before
    assert len(list(plain_names.named_modules(made))) == 4


def test_a_model_that_names_its_parameters_itself_is_asked_each_time() -> None:
    class Own(nn.Linear):
        def named_parameters(self, *_: Any, **__: Any) -> Any:
            return iter([(self.said, self.weight)])

    made: Any = Own(2, 2)
    for made.said in ("one", "two"):
        assert [name for name, _ in plain_names.named_parameters(made)] == [made.said]


def test_equal_models_have_each_their_own_tensors() -> None:
    class Equal(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    for made in (Equal(2, 2), Equal(2, 2)):
        assert everything(made) == of_torch(made)
        assert made == Equal(2, 2)


def test_names_keep_neither_a_model_nor_what_it_has_dropped() -> None:
    made = model()
    everything(made)
    kept = [weakref.ref(made), weakref.ref(made[0]), weakref.ref(made[0].bias)]
    made[0].bias = None
    assert kept[2]() is None
    del made
    gc.collect()
    assert [each() for each in kept] == [None, None, None]

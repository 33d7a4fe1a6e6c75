"""Saved names are those of the model without torch.compile, however much of it is compiled."""

from __future__ import annotations

import torch
from torch import nn

from elastic.engines.model import plain_names
from elastic.engines.model.description import describe


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    made[1][0].weight = made[0].weight
    return made


def compiled() -> nn.Module:
    """A part, a part of which is compiled too, and the whole."""
    made = model()
    made[0] = torch.compile(made[0], backend="eager")
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
    assert plain_names.unwrapped(torch.compile(plain, backend="eager")) is plain  # type: ignore[arg-type]

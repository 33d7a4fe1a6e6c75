"""Which experts a parameter has, by what DeepSpeed keeps with it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.experts.placement import first_element, is_expert, require_experts, whole_shape


class Parameter:
    def __init__(self, experts: list[int], trained: bool = True) -> None:
        self.allreduce, self.requires_grad = False, trained
        self.ds_autoep_uc_meta = {"logical_shape": [8, 3, 5], "local_experts": experts}


class Model:
    def __init__(self, *parameters: Parameter, layer: bool = True) -> None:
        self._parameters, self._is_autoep_layer = parameters, layer

    def modules(self) -> list[Any]:
        return [self]

    def parameters(self) -> list[Any]:
        return list(self._parameters)

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [(f"w{number}", parameter) for number, parameter in enumerate(self._parameters, 1)]


def test_neighbouring_experts_are_an_interval_of_the_whole() -> None:
    parameter = Parameter([4, 5])
    assert is_expert(parameter)
    assert (whole_shape(parameter), first_element(parameter)) == ((8, 3, 5), 60)
    assert (whole_shape(object()), first_element(object()), is_expert(object())) == (None, 0, False)
    with pytest.raises(UsageError, match=r"the experts \[1, 3\], which are not neighbours"):
        first_element(Parameter([1, 3]))


def test_models_that_no_shard_would_hold_are_named() -> None:
    with pytest.raises(UsageError, match=r"AutoEP has found no layer with experts in Model: .*or leave mesh.ep"):
        require_experts(Model(layer=False))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"w2 is frozen \(1 such parameters\)"):
        require_experts(Model(Parameter([0]), Parameter([0], trained=False)))  # type: ignore[arg-type]
    require_experts(Model(Parameter([0])))  # type: ignore[arg-type]

"""Which kernels are compiled before a worker counts as ready; and, slow, what those of Adam keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from elastic.engines.deepspeed import operators
from elastic.engines.deepspeed.operators import build_ahead, needed

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("optimizer", "zero", "builder"),
    [
        ({"type": "AdamW"}, {}, "FusedAdamBuilder"),
        ({"type": "Adam", "params": {"torch_adam": True}}, {}, None),
        ({"type": "AdamW"}, OFFLOAD, "CPUAdamBuilder"),
        ({"type": "AdamW"}, {"offload_optimizer": {"device": "none"}}, "FusedAdamBuilder"),
        ({"type": "Lion"}, OFFLOAD, "CPULionBuilder"),
        ({"type": "Adagrad"}, {}, None),
        ({"type": "SGD"}, {}, None),
        (None, OFFLOAD, None),
    ],
)
def test_the_optimizer_of_the_configuration_says_which(optimizer: Any, zero: Any, builder: str | None) -> None:
    config = {"zero_optimization": zero} | ({"optimizer": optimizer} if optimizer else {})
    assert needed(config) == builder


def test_every_builder_is_one_of_deepspeeds() -> None:
    for name in ("FusedAdamBuilder", "CPUAdamBuilder", "CPULionBuilder", "CPUAdagradBuilder"):
        assert get_accelerator().get_op_builder(name) is not None, name


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_loaded_and_a_compiler_that_fails_is_said(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[str] = []

    class Builder:
        def load(self, verbose: bool) -> None:
            if fails:
                raise RuntimeError("no nvcc")
            loaded.append("fused_adam")

    monkeypatch.setattr(type(get_accelerator()), "create_op_builder", lambda self, name: Builder())
    with caplog.at_level("INFO", operators.logger.name):
        build_ahead({"optimizer": {"type": "Adam"}})
    assert loaded == ([] if fails else ["fused_adam"])
    assert ("could not be built ahead: RuntimeError: no nvcc" in caplog.text) == fails
    build_ahead(None)
    assert len(caplog.records) == 1


@pytest.mark.slow  # compiled where no cache has it
@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "FusedAdam"])
def test_adam_steps_alike_wherever_its_process_has_begun(name: str) -> None:
    """Seen, without the call: other bits after twenty steps than from an optimizer that begins there."""
    from deepspeed.ops import adam

    def made(weight: torch.Tensor) -> tuple[torch.nn.Parameter, Any]:
        parameter = torch.nn.Parameter(weight.clone())
        return parameter, getattr(adam, name)([parameter], lr=0.01, betas=(0.8, 0.999))

    def stepped(parameter: torch.nn.Parameter, optimizer: Any, count: int) -> torch.Tensor:
        for step in range(count):
            parameter.grad = torch.linspace(-1, 1, 64) * (step + 1)
            optimizer.step()
        return parameter.detach()

    parameter, optimizer = made(torch.linspace(0.1, 1, 64))
    other, begun = made(stepped(parameter, optimizer, 20))
    begun.state[other] = copy.deepcopy(optimizer.state[parameter])
    operators.forget_powers(optimizer)
    last = stepped(parameter, optimizer, 5).clone()
    assert torch.equal(last, stepped(other, begun, 5))

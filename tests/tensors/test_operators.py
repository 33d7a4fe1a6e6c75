"""Which kernels are compiled before a worker counts as ready; nothing is compiled here."""

from __future__ import annotations

from typing import Any

import pytest
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

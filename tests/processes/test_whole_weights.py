"""`engine.whole_weights()` and `engine.load_weights()`: the oracle is an export, wherever the parts of tensors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from crew import Crew, Outcome
from expert_model import EPS
from test_huggingface import TIED
from test_oracle import _assert_ended

import elastic

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
LLAMA: dict[str, Any] = {"trains": "hugging_face.train", "family": "Llama"}
MIXTRAL = {**LLAMA, "family": "Mixtral", "model": {"num_local_experts": 4}, "eps": EPS}
STAGED = {"trains": "hugging_face.train_in_stages", "family": "Llama", "engine": "fsdp2"}
FOUR = {"model": {"num_hidden_layers": 4, **TIED}}
FSDP2 = {"engine": "fsdp2"}
BF16 = {"native": {"bf16": {"enabled": True}}}


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        *(pytest.param({**LLAMA, "stage": stage}, {"tp": 2}, id=f"tp-{stage}") for stage in (0, 1, 2, 3)),
        pytest.param({**LLAMA, "stage": 3, "model": TIED}, {}, id="stage 3"),
        pytest.param({**LLAMA, "stage": 2, **BF16}, {"tp": 2}, id="tp in bf16"),
        pytest.param({**LLAMA, "stage": 1, "adapters": True}, {}, id="adapters"),
        pytest.param({**LLAMA, **FSDP2, "model": TIED}, {"tp": 2}, id="tp of torch"),
        pytest.param({**LLAMA, **FSDP2, "family": "GPT2"}, {"tp": 2}, id="transposed"),
        pytest.param({**LLAMA, **FSDP2, "family": "Phi3"}, {"tp": 2}, id="several in one"),
        pytest.param({**LLAMA, **FSDP2, "native": {"shard_workers": 2}}, {}, id="copies of shards"),
        pytest.param({**MIXTRAL, **FSDP2}, {"ep": 2}, id="ep of torch"),
        pytest.param({**MIXTRAL, **FSDP2}, {"ep": 2, "tp": 2}, id="ep and tp of torch"),
        pytest.param({**STAGED, **FOUR}, {"pp": 2}, id="pp"),
        pytest.param({**STAGED, **FOUR}, {"pp": 2, "tp": 2}, id="pp and tp"),
        pytest.param({"trains": "expert_parallel.train", "stage": 2}, {"ep": 2}, id="AutoEP"),
        pytest.param({"trains": "native_moe.train", "stage": 2}, {"ep": 2}, id="deepspeed.moe"),
        pytest.param({"trains": "pipelined.train", "stage": 1}, {"pp": 2}, id="PipelineModule"),
    ],
)
def test_whole_weights_are_those_of_an_export(
    crew: Crew, tmp_path: Path, config: dict[str, Any], axes: dict[str, int]
) -> None:
    given = {"precision": "float32", **config, "url": str(tmp_path / "runs")}
    outcomes = crew.run(range(4), "whole_weights.train", given, **cells.of_run(config), **axes)
    _assert_ended(outcomes, "finished", outcomes[0].result.step)
    assert_equal(outcomes, exported(tmp_path / "runs"))


@pytest.mark.parametrize("source", ["checkpoint", "safetensors"])
@pytest.mark.parametrize(
    ("config", "axes"),
    [
        *(pytest.param({**LLAMA, "stage": stage}, {"tp": 2}, id=f"tp-{stage}") for stage in (0, 2, 3)),
        pytest.param({**LLAMA, **FSDP2}, {"tp": 2}, id="tp of torch"),
        pytest.param({**MIXTRAL, **FSDP2}, {"ep": 2, "tp": 2}, id="ep and tp of torch"),
        pytest.param({**STAGED, **FOUR}, {"pp": 2, "tp": 2}, id="pp and tp"),
    ],
)
def test_weights_of_a_run_without_a_mesh_are_loaded_into_slices(
    crew: Crew, tmp_path: Path, config: dict[str, Any], axes: dict[str, int], source: str
) -> None:
    """Slices by columns are rows of the whole; a checkpoint's digests are compared all the same."""
    others = {**config, "trains": "hugging_face.train", "rate": 0.1, "url": str(tmp_path / "others")}
    crew.run([0], "whole_weights.train", others, **cells.of_run(config))
    wanted = exported(tmp_path / "others")
    folder = tmp_path / "others" / "run"
    if source == "safetensors":
        folder = elastic.export(folder, tmp_path / "hf", to="hf")
    given = {**config, "url": str(tmp_path / "runs"), "others": str(folder)}
    outcomes = crew.run(range(4), "whole_weights.train", given, **cells.of_run(config), **axes)
    _assert_ended(outcomes, "finished", outcomes[0].result.step)
    assert_equal(outcomes, wanted)
    assert any(not torch.equal(value, wanted[name]) for name, value in exported(tmp_path / "runs").items())


def exported(url: Path) -> dict[str, torch.Tensor]:
    file = elastic.export(url / "run", url / "exported", to="torch") / "model.pt"
    found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return found


def assert_equal(outcomes: list[Outcome], wanted: dict[str, torch.Tensor]) -> None:
    first, *others = (outcome.told["whole"] for outcome in outcomes)
    assert others == [{}, {}, {}]
    assert first.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(first[name], value.to(first[name].dtype)), name
    assert any(value.any() for value in first.values())

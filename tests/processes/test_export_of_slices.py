"""Runs whose ranks share layers: their checkpoints exported whole, and runs that begin with whole weights.

The oracles are the model in the run, one rank with whole layers, and slices that the test puts together by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import Run
from crew import Crew, Outcome
from hugging_face import questions
from test_oracle import _distance

import elastic
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

pytestmark = pytest.mark.processes

# Slices are multiplied apart and added up in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
# A run computes with weights that are rounded, and is exported with those that are not.
ROUNDED = 5e-2
SLOW = pytest.mark.slow
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
# Three heads of keys and values: two on one worker, one on the other.
UNEVEN = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 25}
# Without a schedule, which would warm up from a rate of nothing.
LLAMA: dict[str, Any] = {"family": "Llama", "schedule": False}
STEPS = 2

CASES = [
    pytest.param({"stage": 1, "model": UNEVEN | BIASED}, id="stage1-uneven-biases"),
    pytest.param({"stage": 3, "model": TIED}, id="stage3-tied"),
    pytest.param({"stage": 0}, id="stage0", marks=SLOW),
    pytest.param({"stage": 2, "dtype": "bf16", "model": UNEVEN}, id="stage2-bf16-uneven"),
    pytest.param({"engine": "fsdp2", "model": TIED}, id="fsdp2-tied"),
    pytest.param({"engine": "fsdp2", "model": BIASED}, id="fsdp2-biases", marks=SLOW),
]


def trained(
    crew: Crew, url: Path, config: dict[str, Any], who: Sequence[int] = (0, 1, 2, 3), tp: int = 2
) -> tuple[Run, list[Outcome]]:
    spec = {**cells.of_run(config), "batch": BatchSettings(max_steps=STEPS), "tp": tp}
    outcomes = crew.run(who, "hugging_face.train_and_answer", {**LLAMA, **config, "url": str(url)}, **spec)
    assert [outcome.result.kind for outcome in outcomes] == ["finished"] * len(who), outcomes[0].result
    return Run(url, [outcomes], tp), outcomes


def answers_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=questions()).logits
    return found


@pytest.mark.parametrize("config", CASES)
def test_transformers_loads_what_workers_have_trained_in_slices(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    allowed = ROUNDED if config.get("dtype") == "bf16" else ALLOWED
    run, outcomes = trained(crew, tmp_path / "cut", config)
    folder = elastic.export(tmp_path / "cut" / "run", tmp_path / "llama", to="hf")
    for outcome in outcomes:
        torch.testing.assert_close(answers_of(folder), outcome.told["logits"], rtol=0, atol=allowed)
    whole, _ = trained(crew, tmp_path / "whole", config, [0], tp=1)
    expected = run.state(whole.shapes[0])
    # Adam makes a step of the rounding of a gradient.
    assert allowed == ROUNDED or _distance(whole.state(), expected) <= allowed
    written = torch.load(elastic.export(tmp_path / "cut" / "run", tmp_path / "torch", to="torch") / "model.pt")
    for name, value in written.items():
        key = f"master/{name}"
        if key in expected:
            assert torch.equal(value.flatten(), expected[key]), name


@pytest.mark.parametrize("config", CASES)
def test_a_run_begins_with_whole_weights_whoever_has_trained_them(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """A folder of transformers' as source, and a checkpoint of slices, both with other cuts or none here."""
    cut = tmp_path / "cut" / "run"
    trained(crew, tmp_path / "cut", config)
    folder = elastic.export(cut, tmp_path / "llama", to="hf")
    allowed = ROUNDED if config.get("dtype") == "bf16" else ALLOWED
    losses = []
    for number, (source, who, tp) in enumerate(
        [(folder, [0], 1), (folder, [0, 1], 2), (cut, [1, 0], 2), (cut, [0, 1], 1)]
    ):
        run, _ = trained(crew, tmp_path / f"{number}", {**config, "weights": {"source": str(source)}}, who, tp)
        losses.append(run.losses)
    assert all(_distance(losses[0], other) <= allowed for other in losses[1:])
    anew, _ = trained(crew, tmp_path / "anew", config, [0], tp=1)
    assert _distance(losses[0], anew.losses) > 1e-3


def test_slices_that_one_rank_has_otherwise_are_refused_by_name_on_export_alone(crew: Crew, tmp_path: Path) -> None:
    """The rank that writes what is no tensor has cut as it says."""
    config = {"engine": "fsdp2", "plan": "turned", "url": str(tmp_path)}
    outcomes = crew.run(range(2), "tensor_parallel.train", config, tp=2, **cells.of_run(config))
    assert [outcome.result.kind for outcome in outcomes] == ["finished"] * 2, outcomes[0].result
    said = "slices of 'layers.0.mlp.up_proj.weight' cannot be put together: on another rank it is not the part"
    with pytest.raises(UsageError, match=said):
        elastic.export(tmp_path / "run", tmp_path / "out")


def test_what_is_given_back_and_cut_again_in_its_loop_is_exported(crew: Crew, tmp_path: Path) -> None:
    config = {"engine": "fsdp2", "in_loop": True}
    generations = cells.through(crew, tmp_path, "tensor_parallel.train", config, cells.MOVED, tp=2)
    run = Run(tmp_path, generations, 2)
    written = torch.load(elastic.export(tmp_path / "run", tmp_path / "out", to="torch") / "model.pt")
    expected = run.state({name: value.shape for name, value in written.items()} | {"places.weight": (6, 16)})
    assert {key.partition("/")[2] for key in expected} <= set(written)
    for key, value in expected.items():
        kind, name = key.split("/", 1)
        if kind in ("master", "param", "buffer"):
            assert torch.equal(written[name].flatten(), value), key


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_weights_for_a_model_without_values_are_refused_by_name(crew: Crew, tmp_path: Path, engine: str) -> None:
    config = {**LLAMA, "engine": engine, "stage": 1, "device": "meta", "url": str(tmp_path)}
    config["weights"] = {"source": str(tmp_path)}
    outcomes = crew.run(range(2), "hugging_face.train", config, tp=2, **cells.of_run(config))
    for outcome in outcomes:
        assert outcome.result.kind == "usage_error", outcome.result
        assert "'model.embed_tokens.weight' has no values yet (the meta device" in outcome.result.message

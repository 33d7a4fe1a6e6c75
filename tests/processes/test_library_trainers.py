"""Trainers of libraries, with elastic's as their last base, stay in their loop while a rank is lost and replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from safetensors.torch import load_file
from test_trainer_in_loop import entries, through_a_loss

import elastic

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.processes

TRAINS = "library_trainers.trains"
# TRL averages what it logs besides the loss over passes, of which ranks of another number have others.
BY_PASS = ("entropy", "accurac", "reward", "margin", "logps", "logits", "num_tokens", "mean_token")


def engine_of(name: str) -> dict[str, Any]:
    if name == "FSDP2":
        return {"engine": "fsdp2"}
    # At stage 3 no weight is whole but in its module's passes.
    apart = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    stage = {"stage": int(name.removeprefix("ZeRO-")), **{f"stage3_{key}": 0 for key in apart}}
    return {"engine_config": {"zero_optimization": stage}}


@pytest.mark.parametrize("engine", ["ZeRO-1", "ZeRO-3", "FSDP2"])
@pytest.mark.parametrize(
    ("kind", "lora"),
    [("SFT", False), ("SFT", True), ("DPO", False), ("DPO", True), ("Reward", False), ("Seq2Seq", False)],
    ids=["SFT", "SFT-LoRA", "DPO", "DPO-LoRA", "Reward", "Seq2Seq"],
)
def test_a_trainer_of_a_library_goes_on_with_the_same_losses(
    crew: Crew, tmp_path: Path, engine: str, kind: str, lora: bool
) -> None:
    """Seq2Seq generates text in its evaluations, of another length on each rank."""
    config = {"kind": kind, "lora": lora}
    grown, still = through_a_loss(crew, tmp_path, TRAINS, config, 2, 10, **engine_of(engine))
    for moved, wanted in zip(grown, still, strict=True):
        for key in ("steps", "zero", "processes", "epoch"):
            assert moved.told[key] == wanted.told[key], key
        assert len(entries(moved)) == len(entries(wanted)) > 8
        for one, other in zip(entries(moved), entries(wanted), strict=True):
            named = {key: value for key, value in other.items() if not any(part in key for part in BY_PASS)}
            assert {key: one[key] for key in named} == pytest.approx(named, rel=1e-4)
        if lora:
            first, *_, last = (entry["eval_loss"] for entry in wanted.told["log"][:-1] if "eval_loss" in entry)
            assert moved.told["best"] == pytest.approx(first, rel=1e-4)
            assert abs(first - last) > 1e-3 * first
    if lora:
        exported = elastic.export(tmp_path / "moved" / "run", tmp_path / "hf", to="hf")
        written, own = (
            {name: tensor.shape for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
            for folder in (exported, tmp_path / "moved")
        )
        assert written == own, "as the Trainer itself has written it"

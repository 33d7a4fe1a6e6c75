"""TRL's Trainers, and PEFT's adapters, stay in their loop while a rank is lost and replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from test_trainer_in_loop import entries, through_a_loss

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.processes

ZERO_1 = {"engine_config": {"zero_optimization": {"stage": 1}}}
# TRL averages what it logs besides the loss over passes, of which ranks of another number have others.
BY_PASS = ("entropy", "accurac", "rewards", "logps", "logits", "num_tokens", "mean_token")


@pytest.mark.parametrize("engine", [ZERO_1, {"engine": "fsdp2"}], ids=["ZeRO-1", "FSDP2"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
def test_a_trainer_of_trl_goes_on_with_the_same_losses(
    crew: Crew, tmp_path: Path, engine: dict[str, Any], kind: str, lora: bool
) -> None:
    grown, still = through_a_loss(crew, tmp_path, "trl_trainers.trains", {"kind": kind, "lora": lora}, 2, 10, **engine)
    for moved, wanted in zip(grown, still, strict=True):
        for key in ("steps", "zero", "processes", "epoch"):
            assert moved.told[key] == wanted.told[key], key
        assert len(entries(moved)) == len(entries(wanted)) > 8
        for one, other in zip(entries(moved), entries(wanted), strict=True):
            named = {key: value for key, value in other.items() if not any(part in key for part in BY_PASS)}
            assert {key: one[key] for key in named} == pytest.approx(named, rel=1e-4)

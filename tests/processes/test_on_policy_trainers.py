"""Trainers that train on their model's completions go on with the same ones while a rank is lost and replaced."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import on_policy_trainers
import pytest
from crew import Crew, Outcome
from hugging_face import model_of
from test_library_trainers import engine_of
from test_oracle import _assert_ended
from test_trainer_in_loop import entries, through_a_loss

from elastic.core.generation_spec import BatchSettings

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.processes

TRAINS = "on_policy_trainers.trains"
# Of 36 prompts in steps of 12: epochs of TRL's own end with a whole step.
WHOLE = {"prompts": 36, "arguments": {"shuffle_dataset": False, "logging_steps": 1}}


def logged(outcome: Outcome) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "step_time"} for entry in entries(outcome)]


def assert_logged_alike(grown: list[Outcome], still: list[Outcome]) -> None:
    for moved, wanted in zip(grown, still, strict=True):
        for key in ("steps", "zero", "processes", "epoch"):
            assert moved.told[key] == wanted.told[key], key
        assert len(logged(moved)) == len(logged(wanted)) > 3
        for one, other in zip(logged(moved), logged(wanted), strict=True):
            # Of a step with as many better as worse completions the loss is rounding alone.
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("engine", ["ZeRO-1", "ZeRO-3", "FSDP2"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("GRPO", {"arguments": {"eval_strategy": "steps", "eval_steps": 3}}),
        ("GRPO", {"lora": True, "arguments": {"beta": 0.1}}),
        ("GRPO", {"reference": True, "arguments": {"beta": 0.1, "loss_type": "dr_grpo", "log_completions": True}}),
        ("RLOO", {"reference": True, "arguments": {"ds3_gather_for_generation": False}}),
    ],
    ids=["GRPO", "GRPO-LoRA", "GRPO-reference", "RLOO"],
)
def test_completions_rewards_and_losses_are_those_of_the_undisturbed_run(
    crew: Crew, tmp_path: Path, engine: str, kind: str, more: dict[str, Any]
) -> None:
    """Sampled by the model: a reward, a length or a loss would be another one with other completions."""
    config = {"kind": kind, **more}
    if more.get("reference"):
        config["reference"] = str(tmp_path / "reference")
        model_of(on_policy_trainers.LLAMA).save_pretrained(config["reference"])
    grown, still = through_a_loss(crew, tmp_path, TRAINS, config, 2, 10, **engine_of(engine))
    assert_logged_alike(grown, still)
    rewards = [entry["reward"] for entry in grown[0].told["log"] if "reward" in entry]
    assert len(set(rewards)) == len(rewards) > 2
    assert [outcome.told["ahead"] for outcome in grown] == [False, False, True], "made while the others trained"
    # At stage 1 those that are left keep what they have of the step in which the other was lost.
    kept = [outcome.told.get("continued", False) for outcome in grown]
    assert kept == [engine == "ZeRO-1", engine == "ZeRO-1", False]


@pytest.mark.parametrize("engine", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_a_worker_is_lost_while_it_scores_completions(crew: Crew, tmp_path: Path, engine: str) -> None:
    assert_logged_alike(
        *through_a_loss(crew, tmp_path, TRAINS, {"kind": "GRPO", "scoring": True}, 2, 10, **engine_of(engine))
    )


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        *(("GRPO", {"loss_type": loss}) for loss in ("dapo", "grpo", "dr_grpo")),
        # Without its reference, which would have to be read from somewhere.
        ("RLOO", {"beta": 0.0}),
    ],
    ids=["dapo", "grpo", "dr_grpo", "RLOO"],
)
def test_with_the_same_completions_losses_are_those_of_trls_own_trainer(
    crew: Crew, tmp_path: Path, kind: str, types: dict[str, Any]
) -> None:
    """In one process, with as many steps of accumulation as the three ranks have together."""
    arguments = {**WHOLE["arguments"], **types}
    config = {"kind": kind, "told": True, **WHOLE, "arguments": arguments, "victim": 0, "url": str(tmp_path / "run")}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, **engine_of("ZeRO-1")}
    ours = crew.run([0, 1, 2], TRAINS, config, **more)
    _assert_ended(ours, "finished", 9)
    alone = {**config, "url": str(tmp_path / "alone"), "arguments": {**arguments, "gradient_accumulation_steps": 6}}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        wanted = pool.submit(on_policy_trainers.plainly, alone).result(timeout=300)
    keys = ("loss", "reward", "rewards/wished/mean", "num_tokens", "completions/mean_length", "completions/max_length")
    for one, other in zip(ours[0].told["log"][:9], wanted[:9], strict=True):
        assert {key: one[key] for key in keys} == pytest.approx({key: other[key] for key in keys}, rel=1e-3, abs=1e-5)

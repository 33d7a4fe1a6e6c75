"""What ranks tell of the memory that their training state takes, against what engines have allocated: DeepSpeed in all
types, with offload too, after two steps of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from deepspeed_ranks import verdicts_of
from held_ranks import CASES, COMPILED, WORLDS

from elastic.core.generation_spec import BatchSettings

OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return verdicts_of("held_ranks.py", tmp_path_factory.mktemp("held"))


@pytest.mark.parametrize("case", list(CASES))
def test_a_rank_tells_what_deepspeed_has_allocated(case: str, verdicts: dict[str, str]) -> None:
    _agree(case, verdicts)


@pytest.mark.slow
def test_with_masters_in_half_precision_and_deepspeeds_adam_of_the_host(tmp_path: Path) -> None:
    verdicts = verdicts_of("held_ranks.py", tmp_path, "compiled")
    for case in COMPILED:
        _agree(case, verdicts)


def _agree(case: str, verdicts: dict[str, str]) -> None:
    found = {name: verdict for name, verdict in verdicts.items() if name.rsplit("-", 3)[0] == case}
    assert len(found) == (len(WORLDS) if case.endswith("3") else sum(map(len, WORLDS.values())))
    assert "".join(found.values()) == ""


@pytest.mark.processes
@pytest.mark.parametrize(
    "more",
    [
        {"top": {"data_types": {"grad_accum_dtype": "fp32"}}},
        {"optimizer": "sgd", "zero": OFFLOAD, "top": {"zero_force_ds_cpu_optimizer": False}},
    ],
    ids=["fp32 sums", "offload"],
)
def test_three_processes_of_stage_3_have_what_is_computed(crew: Crew, tmp_path: Path, more: dict[str, Any]) -> None:
    """Where not only the first rank trains. Each has parts of equal sizes, and tells of its own without their padding.
    The 16 elements of a bias that all have whole were gathered from three parts of 6."""
    config = {"stage": 3, "dtype": "bf16", "url": str(tmp_path), **more}
    outcomes = crew.run([0, 1, 2], "held_ranks.train_and_tell", config, batch=BatchSettings(max_steps=2))
    assert [outcome.result.kind for outcome in outcomes] == 3 * ["finished"], outcomes[0].result
    told = [outcome.told for outcome in outcomes]
    computed, gathered = told[0]["computed"], 2 * 2
    assert [each["real"] for each in told] == 3 * [computed + gathered]
    assert told[0]["own"] == computed > told[2]["own"]

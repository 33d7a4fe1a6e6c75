"""State written by a native DeepSpeed engine at W and read back at W' gives the same tensors by name, and the same run.

Three processes run all cases one after the other (each in process groups of its own), so that torch and DeepSpeed are
imported three times only; every case is a test here.
"""

from __future__ import annotations

import pytest
from native_cases import CASES
from native_processes import run_processes

# The module's fixture trains in many processes, one after the other.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_processes("native_cases", 3, tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("case", list(CASES))
def test_state_survives_another_world_size(case: str, verdicts: list[dict[str, str]]) -> None:
    for rank, verdict in enumerate(verdicts):
        assert not verdict.get("start"), f"rank {rank} did not start: {verdict['start']}"
        assert case in verdict, f"rank {rank} did not reach this case: an earlier one failed"
        assert verdict[case] == "", f"rank {rank}: {verdict[case]}"

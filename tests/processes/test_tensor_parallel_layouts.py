"""The layouts of lanes against DeepSpeed's own at world sizes that no test machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensor_parallel_ranks import WORLDS, ZERO

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In a process of its own: the fake group, DeepSpeed's globals and the environment stay there."""
    report = tmp_path_factory.mktemp("lanes") / "verdicts.json"
    done = subprocess.run(
        [sys.executable, str(_HERE / "tensor_parallel_ranks.py"), str(report)],
        env=os.environ | {"PYTHONPATH": str(_HERE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize(("world_size", "tp"), list(WORLDS))
@pytest.mark.parametrize("zero", list(ZERO))
def test_a_lane_is_partitioned_as_a_world_of_its_own(
    zero: str, world_size: int, tp: int, verdicts: dict[str, str]
) -> None:
    for rank in WORLDS[world_size, tp]:
        assert verdicts[f"{zero}-{rank}-of-{world_size}-tp{tp}"] == ""

"""Our layouts against DeepSpeed's own at world sizes that no test machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_ranks import WORLDS, ZERO

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In a process of its own: the fake group, DeepSpeed's globals and the environment stay there."""
    report = tmp_path_factory.mktemp("layouts") / "verdicts.json"
    environment = os.environ | {"PYTHONPATH": str(_HERE.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(_HERE / "deepspeed_ranks.py"), str(report)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("world_size", list(WORLDS))
@pytest.mark.parametrize("zero", list(ZERO))
def test_layout_is_that_of_deepspeed(zero: str, world_size: int, verdicts: dict[str, str]) -> None:
    for rank in WORLDS[world_size]:
        assert verdicts[f"{zero}-{rank}-of-{world_size}"] == ""


def test_the_private_fake_process_group_is_still_there(verdicts: dict[str, str]) -> None:
    """A canary: when a new torch moves or changes it, this says so."""
    assert verdicts["canary"] == ""

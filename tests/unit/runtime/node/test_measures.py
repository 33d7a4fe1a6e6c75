"""What a node can do, from the process that measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from elastic.runtime.node.measures import rates


def test_every_rate_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = rates(str(tmp_path))
    assert found.keys() == {"gemm", "memory", "disk"}
    assert min(found.values()) > 1e6
    assert list(tmp_path.iterdir()) == []


def test_as_a_process_it_prints_one_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic.runtime.node.measures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout).keys() == {"gemm", "memory", "disk"}


def test_a_folder_that_cannot_be_written_ends_it_with_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic.runtime.node.measures", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "none" in done.stderr

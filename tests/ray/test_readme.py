"""The README's block for Ray Train scripts, pasted into a file and run as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

_README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_block_for_ray_train_scripts_runs_when_pasted(tmp_path: Path) -> None:
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", _README.read_text(), re.S) if "ElasticTrainer(" in block
    ]
    assert len(blocks) == 1
    script = tmp_path / "pasted.py"
    assert blocks[0].count('"/tmp/runs"') == 1
    script.write_text(blocks[0].replace('"/tmp/runs"', repr(str(tmp_path / "runs"))))
    # A Ray of its own: no address of another test's cluster.
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "'step': 100" in done.stdout
    assert "'status': 'finished'" in done.stdout

"""The benchmark of one device, small: every figure of it is measured, on whatever device there is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Figure

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_every_figure_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(out.read_text(encoding="utf-8"))
    figures = {(figure.name, figure.subject): figure for figure in map(Figure.from_json, told["figures"])}
    assert [name for name, figure in figures.items() if not figure.values] == []
    rebuilds = figures["rebuild in the process: last step to next step", "ray-elastic"]
    assert len(rebuilds.values) == 4
    assert min(rebuilds.values) > 0
    # Each of the rebuilds was restored from the memory of the process next to it.
    assert len(figures["restore from memory, reading and installing", "ray-elastic"].values) == 4
    assert len(figures["training thread, or its stream, kept by a snapshot", "ray-elastic"].values) == 4
    assert len(figures["leaving a generation, a snapshot under way", "ray-elastic"].values) == 3
    assert len(figures["a process group of one: made, used, aborted, destroyed", "ray-elastic"].values) == 3
    assert {subject for name, subject in figures if name == "training kept by a durable save"} == {
        "engine.save_checkpoint",
        "torch DCP async_save",
    }

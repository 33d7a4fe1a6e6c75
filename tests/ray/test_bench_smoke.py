"""The benchmarks as a whole, with the smallest case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from elastic_cluster.local import processes

from benchmarks.figures import Figure

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ray
def test_one_case_from_the_command_to_the_file(tmp_path: Path) -> None:
    before = leftovers()
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--case", "smoke", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    figures = [Figure.from_json(figure) for figure in told["figures"]]
    assert [figure.failure for figure in figures] == [""] * len(figures)
    recovery, repeated, moved = figures
    assert recovery.unit == "s"
    assert recovery.values[0] > 0
    # The last step may have had no snapshot yet when the node was lost; the one before it had.
    assert repeated.values[0] <= 1
    (incident,) = recovery.details["incidents"]
    assert (incident["kind"], incident["source"], incident["world_sizes"]) == ("node-lost", "memory", [4, 3])
    assert moved.values == (incident["restore"]["bytes_from"]["network"] / 1e6,)
    line = incident["timeline"]
    marks = ["detected", "decided", "rebuilt", "restored", "verified", "first_step"]
    assert [line[mark] for mark in marks] == sorted(line[mark] for mark in marks)
    assert line["detected"] <= line["aborted"] <= line["rebuilt"]
    assert told["machine"]["cores"] >= 1
    assert len(told["cases"][0]["before"]["load"]) == 3
    assert "node SIGKILL" in done.stdout
    assert leftovers() == before


def leftovers() -> tuple[list[str], set[int]]:
    """Folders of cases, and processes that lost their parents within this test's own tree."""
    folders = sorted(str(path) for path in Path(tempfile.gettempdir()).glob("benchmark-smoke-*"))
    return folders, processes.descendants([os.getpid()], processes.table())

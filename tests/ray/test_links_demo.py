"""`demo.py --links`, small: five real runs on emulated links that change in mid-run, judged by their journals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from elastic_cluster.local import processes
from harness import wait_until

from elastic.core.policy.communication import EXACT
from elastic.observe.journal import JournalReader
from elastic.observe.steps import collective_table, final_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, EVERY, CHANGE = 110, 40, 41
# Relative. Seen over 720 steps: see docs/communication.md.
TOLERANCE = 1e-5


def link(rate: int) -> dict[str, float]:
    return {"latency_ms": 0.1, "mb_per_s": rate}


def small_job() -> dict[str, Any]:
    """All links alike, where a ring is a fifth faster than reducing by nodes, which share their link; then slow ones
    between nodes, where it is a third slower. Both differences are tens of milliseconds per step."""
    job = yaml.safe_load((EXAMPLES / "links.yaml").read_text())
    job["config"]["phases"] = [
        {"name": "equal", "from_step": 1, "node": link(50), "nodes": link(50)},
        {"name": "far apart", "from_step": CHANGE, "node": link(1000), "nodes": link(20)},
    ]
    job["communication"]["check_every_steps"] = EVERY
    return {**job, "max_steps": STEPS}


@pytest.mark.timeout(800)
def test_auto_follows_the_links_and_all_runs_train_alike(tmp_path: Path) -> None:
    folder, file = tmp_path / "links", tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(small_job()))
    done = subprocess.run(
        [sys.executable, "demo.py", "--links", str(file), "--folder", str(folder)],
        cwd=EXAMPLES, env={**os.environ, "A_TEST": str(tmp_path)},
        capture_output=True, text=True, timeout=750, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    records = {name: list(JournalReader(str(folder), name).records()) for name in ("auto", *EXACT)}
    table = collective_table(records["auto"])
    assert table is not None
    told = {step: travel.partition(":")[0] for step, travel in table.travel}
    # Whatever was found in between: the ring's or the backend's way at first, the other one after the change.
    assert list(told.values())[:1] == ["each in turn"]
    assert [name for step, name in told.items() if step < CHANGE][-1] in ("all_reduce", "ring")
    assert list(told.values())[-1] == "hierarchical"
    assert max(told) > CHANGE

    losses = {name: {step["step"]: step["loss"] for step in final_steps(found)} for name, found in records.items()}
    assert losses["auto"].keys() == set(range(1, STEPS + 1))
    for name in EXACT:
        assert losses[name] == pytest.approx(losses["auto"], rel=TOLERANCE, abs=0.0), name
    # Trained, and not a constant.
    assert losses["auto"][STEPS] < 0.8 * losses["auto"][1]

    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith((*EXACT, "brute"))] == [
        *EXACT, "brute",
    ]  # fmt: skip
    assert "regret against brute force: " in done.stdout
    assert done.stdout.count("auto, from step ") == len(told)
    assert (folder / "result.txt").read_text() in done.stdout

    assert list(folder.glob("*-links")) == []
    wait_until(lambda: not left(tmp_path), "the processes of the demo to end")


def left(folder: Path) -> list[int]:
    """Processes that the demo started."""
    found = processes.table().values()
    return [p.pid for p in found if not p.zombie and processes.environment(p.pid).get("A_TEST") == str(folder)]

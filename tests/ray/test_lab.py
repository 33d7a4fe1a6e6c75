"""`make lab`, small: both runs through their killed node, judged by their journals and not by what the lab says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from lab.classifier import Shape, build
from lab.sentences import made

from elastic.observe.journal import JournalReader

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12
# Seen: 4e-8 over as many steps. Both runs add up in another order.
TOLERANCE = 1e-5


def lab(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab", *options],
        cwd=EXAMPLES, env=dict(os.environ), capture_output=True, text=True, timeout=700, check=False,
    )  # fmt: skip


def records(folder: Path, stage: int, kind: str) -> list[Any]:
    return [record for record in JournalReader(str(folder), f"stage-{stage}").records() if record["type"] == kind]


def steps(folder: Path, stage: int) -> list[dict[str, Any]]:
    return [step for record in records(folder, stage, "steps") for step in record["steps"]]


def padded(tensors: list[int], ranks: int) -> int:
    """Bytes of fp32 tensors, each made a multiple of `ranks` long."""
    return sum(4 * (numel + -numel % ranks) for numel in tensors)


@pytest.mark.timeout(800)
def test_two_stages_through_a_killed_node(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    done = lab("--sentences", str(24 * STEPS), "--repetitions", "2", "--folder", str(folder), "--hub-wait", "1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    job = yaml.safe_load((EXAMPLES / "lab.yaml").read_text())
    tensors = [p.numel() for p in build(Shape.of(job["config"])).parameters()]

    losses = [{step["step"]: step["loss"] for step in steps(folder, stage)} for stage in (0, 3)]
    assert losses[0].keys() == losses[1].keys() == set(range(1, STEPS + 1))
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < TOLERANCE
    for stage in (0, 3):
        assert any(incident["kind"] == "node-lost" for incident in records(folder, stage, "incident"))
        samples = records(folder, stage, "samples")[-1]
        assert (samples["seen"], samples["missing"], samples["repeated"]) == (24 * STEPS, 0, 0)

        sizes = {g["number"]: g["world_size"] for g in records(folder, stage, "generation") if "first_step" in g}
        assert sorted(sizes.values()) == [2, 3]
        first = {g: min(s["step"] for s in steps(folder, stage) if s["generation"] == g) for g in sizes}
        counted = [step for step in steps(folder, stage) if step.get("collectives")]
        assert {sizes[step["generation"]] for step in counted} == {2, 3}
        for step in counted:
            moved = {op: size for op, axis, _, _, size, *_ in step["collectives"] if axis == "dp"}
            moved.pop("broadcast", None)
            ranks = sizes[step["generation"]]
            if stage == 0:
                assert moved == {"all_reduce": 4 * sum(tensors) + 4}
                continue
            micro_batches, whole = 24 // 4 // ranks, padded(tensors, ranks)
            again = step["step"] == first[step["generation"]]
            assert moved == {
                "all_gather_into_tensor": (micro_batches + again) * whole,
                "reduce_scatter_tensor": micro_batches * whole,
                "all_reduce": 8,
            }, step["step"]

    # Without a hub it trains on what is made by rules, and says so.
    data = json.loads((folder / "data.json").read_text())
    if "no SST-2" in done.stdout:
        assert data["labels"] == list(made(24 * STEPS).labels)
    for picture in folder.glob("*.svg"):
        ElementTree.parse(picture)
    assert len(list(folder.glob("stage-3-step-*.svg"))) == 2
    assert "WRONG" not in done.stdout


def test_too_few_sentences_are_refused_in_one_sentence() -> None:
    done = lab("--sentences", "100")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "lab: error: --sentences 100: fewer than 8 steps of 24, so that nothing could be seen before and after the "
        "killed node; give 192 or more"
    )

"""A checkpoint that an early release has written (2026-11-21, two ranks, stage 2, step 2) is one of today's."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Outcome

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.manifest_json import to_json
from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

KEPT = Path(__file__).parents[1] / "data" / "release-2026-11-21"
ID = "step-00000002-g0001"
MORE: dict[str, Any] = {"batch": BatchSettings(max_steps=4), "max_world_size": 2}


def losses(outcomes: list[Outcome]) -> dict[int, float]:
    found: Counter[int] = Counter()
    for outcome in outcomes:
        assert outcome.result.kind == "finished", outcome.result.traceback
        for report in outcome.reports:
            found[report.step] += report.loss
    return dict(found)


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (1, 1), (3, 2)])
def test_a_run_goes_on_from_it_as_one_that_was_never_stopped(
    crew: Crew, tmp_path: Path, stage: int, ranks: int
) -> None:
    still = losses(crew.run([0, 1], "old_release.train", {"stage": 2, "url": str(tmp_path / "still")}, **MORE))
    shutil.copytree(KEPT, tmp_path / "old" / "run" / "checkpoints")
    told = {"stage": stage, "url": str(tmp_path / "old")}
    resumed = crew.run(range(ranks), "old_release.train", told, checkpoint=ID, **MORE)
    assert losses(resumed) == pytest.approx({step: still[step] for step in (3, 4)}, rel=1e-5)
    assert {outcome.told["seen"] for outcome in resumed} == {"by an old release"}


def test_its_manifest_is_written_as_it_was(tmp_path: Path) -> None:
    shutil.copytree(KEPT, tmp_path / "run" / "checkpoints")
    manifest = CheckpointStore(str(tmp_path), "run").manifest(ID)
    assert to_json(manifest) == (KEPT / ID / "manifest.json").read_text()

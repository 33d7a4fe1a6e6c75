"""Bugs of resharding among ranks with slices, experts or layers of their own: none gets as far as a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cells import BATCH, of_run
from crew import Crew, Outcome

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

SAVED = 3
# Training function, its configuration, and the mesh before and after.
AUTOEP = "expert_parallel.train"
AUTOTP = "tensor_parallel.train"
STAGED = "staged.train"
Mesh = tuple[Sequence[int], Mapping[str, int]]
CASES: Mapping[str, tuple[str, dict[str, Any], Mesh, Mesh]] = {
    "ep, stage 1": (AUTOEP, {"stage": 1}, ((0, 1, 2, 3), {"ep": 2}), ((2, 0, 1, 3), {"ep": 4})),
    "ep, stage 2": (AUTOEP, {"stage": 2}, ((0, 1, 2, 3), {"ep": 4}), ((2, 0, 1, 3), {"ep": 2})),
    "ep, stage 3": (AUTOEP, {"stage": 3}, ((0, 1, 2, 3), {"ep": 2}), ((2, 0), {"ep": 2})),
    "ep, stage 0": (AUTOEP, {"stage": 0, "clipping": 0}, ((0, 1, 2, 3), {"ep": 2}), ((2, 0, 1, 3), {"ep": 4})),
    "ep and sp, stage 1": (
        AUTOEP,
        {"stage": 1, "sequences": True},
        ((0, 1, 2, 3), {"ep": 2, "sp": 2}),
        ((2, 0, 3, 1), {"ep": 2, "sp": 2}),
    ),
    **{
        f"ep and tp, stage {stage}": (
            AUTOEP,
            {"stage": stage, "layers": True},
            ((0, 1, 2, 3), {"ep": 2, "tp": 2}),
            ((2, 0, 3, 1), {"ep": 2, "tp": 2}),
        )
        for stage in (1, 2, 3)
    },
    "tp, stage 1": (AUTOTP, {"stage": 1}, ((0, 1, 2, 3), {"tp": 2}), ((2, 0), {"tp": 2})),
    "tp, stage 2": (AUTOTP, {"stage": 2}, ((0, 1, 2, 3), {"tp": 2}), ((3, 1), {"tp": 2})),
    "tp, stage 3": (AUTOTP, {"stage": 3}, ((0, 1), {"tp": 2}), ((2, 0, 1, 3), {"tp": 2})),
    "tp, fsdp2": (AUTOTP, {"engine": "fsdp2"}, ((0, 1, 2, 3), {"tp": 2}), ((2, 0, 1, 3), {"tp": 2})),
    "other tp, stage 1": (AUTOTP, {"stage": 1}, ((0, 1), {"tp": 2}), ((2, 0, 1), {"tp": 3})),
    "copies, fsdp2": (
        "trainings.train",
        {"engine": "fsdp2", "fsdp2": {"shard_workers": 2}},
        ((0, 1, 2, 3), {}),
        ((2, 0, 1, 3), {}),
    ),
    "pp, fsdp2": (STAGED, {"engine": "fsdp2"}, ((0, 1, 2, 3), {"pp": 2}), ((2, 0, 3, 1), {"pp": 2})),
    "ep and pp, fsdp2": (
        STAGED,
        {"engine": "fsdp2", "experts": True},
        ((0, 1, 2, 3), {"ep": 2, "pp": 2}),
        ((2, 0, 3, 1), {"ep": 2, "pp": 2}),
    ),
}


def _run(crew: Crew, url: Path, case: str, part: int, bug: str | None, **more: Any) -> list[Outcome]:
    trains, config, *meshes = CASES[case]
    who, mesh = meshes[part]
    told = {**config, "in_loop": False, "trains": trains, "bug": bug, "url": str(url)}
    # Of four experts.
    changes = {"ep_sizes": (1, 2) if "tp" in mesh else (1, 2, 4)} if "ep" in mesh else {}
    crew.begin(
        who, "lane_bugs.train", told, batch=BATCH, max_world_size=4, engine=of_run(config)["engine"],
        anomalies=AnomalySettings("stop"), **mesh, **changes, **more,
    )  # fmt: skip
    # As the controller does: where one has failed, the others are ended. A later stage fails first.
    found = [crew.outcome(who[-1])]
    for number in reversed(who[:-1]):
        if found[0].result.kind not in ("finished", "ended"):
            crew.abort(number, "another rank has failed")
        found.append(crew.outcome(number))
    return found


def _saved(crew: Crew, url: Path, case: str, bug: str | None) -> tuple[list[Outcome], str | None]:
    outcomes = _run(crew, url, case, 0, bug, end_at=SAVED)
    found = CheckpointStore(str(url), "run").list()
    return outcomes, found[0].id if found else None


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_the_run_goes_on(crew: Crew, tmp_path: Path, case: str) -> None:
    outcomes, checkpoint = _saved(crew, tmp_path, case, None)
    assert checkpoint is not None, outcomes[0].result
    after = _run(crew, tmp_path, case, 1, None, checkpoint=checkpoint)
    assert {outcome.result.kind for outcome in after} == {"finished"}, after[0].result


# All but the last are in what reads a checkpoint only. With that two stages save tensors of the same names, of which no
# checkpoint can be put together ("both hold" in tests/unit/core/checkpoint/test_manifest.py).
CUT_ANEW = ("slices of the other lane", "elements one further", "boxes transposed", "moments of another kind")
# Of two ranks each has two heads of four, nearly even or not.
NEARLY = "slices of nearly even widths"
NONE = [
    (bug, when)
    for bug in ("slices of the other rank", *CUT_ANEW, "layers counted within the stage")
    for when in ("saving", "both")
] + [(NEARLY, "saving")]
FOUND = [
    ("ep, stage 1", "experts of the next rank"),
    ("ep, stage 1", "experts in reverse"),
    ("ep, stage 2", "experts of the next rank"),
    ("ep, stage 2", "experts in reverse"),
    ("ep, stage 3", "experts of the next rank"),
    ("ep, stage 0", "experts of the next rank"),
    ("ep and sp, stage 1", "experts in reverse"),
    *(
        (f"ep and tp, stage {stage}", bug)
        for stage in (1, 2, 3)
        for bug in ("experts counted over lanes", "experts of one lane in reverse", "slices of the other rank")
    ),
    ("tp, stage 1", "slices of the other rank"),
    ("tp, stage 2", "slices of the other rank"),
    ("tp, stage 3", "slices of the other rank"),
    ("tp, fsdp2", "slices of the other rank"),
    ("tp, fsdp2", "blocks in reverse"),
    ("tp, fsdp2", "padding counted"),
    *(("other tp, stage 1", bug) for bug in (*CUT_ANEW, NEARLY)),
    ("copies, fsdp2", "blocks in reverse"),
    ("copies, fsdp2", "padding counted"),
    ("pp, fsdp2", "layers counted within the stage"),
    ("pp, fsdp2", "blocks in reverse"),
    ("ep and pp, fsdp2", "rows of the next experts"),
    ("ep and pp, fsdp2", "layers counted within the stage"),
]


WHEN = ("restoring", "saving", "both")


@pytest.mark.parametrize(
    ("case", "bug", "when"),
    [
        pytest.param(*found, when, marks=() if when == "restoring" else pytest.mark.slow)
        for found in FOUND
        for when in WHEN
        if (found[1], when) not in NONE
    ],
)
def test_no_bug_gets_as_far_as_a_step(crew: Crew, tmp_path: Path, case: str, bug: str, when: str) -> None:
    outcomes, checkpoint = _saved(crew, tmp_path, case, None if when == "restoring" else bug)
    if checkpoint is not None:
        outcomes = _run(crew, tmp_path, case, 1, None if when == "saving" else bug, checkpoint=checkpoint)
    kinds = {outcome.result.kind for outcome in outcomes}
    # Those that were ended because another one has failed.
    assert kinds - {"ended"}, "nobody has noticed"
    assert kinds <= {"ended", "usage_error", "restore_failed", "collective_failed"}, outcomes[0].result
    assert checkpoint is None or max(len(outcome.reports) for outcome in outcomes) == 0, "a step was made of it"

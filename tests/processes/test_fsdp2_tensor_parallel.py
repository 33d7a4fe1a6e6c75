"""Layers that ranks share by torch's own tensor parallelism, below `fully_shard`: its options, plans and lost ranks.

What all engines have in common is in test_tensor_parallel; what is refused, and layouts, in
tests/tensors/test_fsdp2_tensor_parallel.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cells import AT, LAST_STEP, MOVED, WHOLE, Run, assert_every_sample_once, of_run, with_a_rank_killed
from crew import Crew
from test_oracle import _assert_ended, _distance
from test_tensor_parallel import ALLOWED, through

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

FSDP2: dict[str, Any] = {"engine": "fsdp2"}
IN_LOOP: dict[str, Any] = {**FSDP2, "in_loop": True}
SLOW = pytest.mark.slow

# As torchtitan has layers, and begins, with rank 0's seed; oracles are built on one device.
THERE, ABSENT = {"numbered": "there"}, {"numbered": "absent", "recomputed": "wrapped", "seeded by": "tp"}

# Each of the slow ones differs in one option from a way beside it.
WAYS = [
    pytest.param({"plan": "own"}, id="by names of its own", marks=SLOW),
    pytest.param({"plan": "sequences"}, id="sequences between matrices"),
    pytest.param(
        {"fsdp2": {"shard": ["Linear"], "reshard_after_forward": False}}, id="layers kept gathered", marks=SLOW
    ),
    pytest.param({"fsdp2": {"shard": []}}, id="all at once", marks=SLOW),
    pytest.param({"fsdp2": {"cpu_offload": True}}, id="offload"),
    pytest.param({"recomputed": True, "dropout": 0.2}, id="recomputed"),
    pytest.param(ABSENT, id="built without memory"),
    pytest.param({"compiled": True}, id="compiled", marks=SLOW),
    # Of other lengths and, in the epoch's last step, of fewer rows: torch 2.13 cannot trace two sizes that vary.
    pytest.param({"compiled": True, "lengths": True}, id="compiled at many sizes"),
]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_rank_with_whole_layers(crew: Crew, tmp_path: Path, way: dict[str, Any]) -> None:
    plain = {key: value for key, value in way.items() if key in ("dropout", "lengths")}
    plain |= THERE if "numbered" in way else {}
    whole = through(crew, tmp_path / "whole", {**FSDP2, **plain}, WHOLE, tp=1)
    moved = through(crew, tmp_path / "moved", {**IN_LOOP, **way}, MOVED)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)
    # Members 1 and 3 have stood by while the others came to the epoch's end; 0 and 2 were in all generations.
    assert [outcome.told["calls"] for outcome in moved.outcomes[-4:]] == [2, 2, 1, 1]


@pytest.mark.slow
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path) -> None:
    config = {**IN_LOOP, "fsdp2": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    still = through(crew, tmp_path / "still", config, [(range(4), None)])
    moved = through(crew, tmp_path / "moved", config, MOVED)
    assert _distance(still.losses, moved.losses) <= 1e-2
    for one, other in zip(still.lanes, moved.lanes, strict=True):
        assert _distance(one, other) <= 1e-2


@pytest.mark.parametrize(
    ("where", "strict", "built"),
    [
        *(pytest.param(where, False, {}, marks=SLOW) for where in ("forward", "backward", "step")),
        pytest.param("backward", True, {}, id="backward-True"),
        pytest.param("step", True, ABSENT, id="built without memory"),
    ],
)
def test_survivors_of_a_killed_rank_stay_in_their_loop(
    crew: Crew, tmp_path: Path, where: str, strict: bool, built: dict[str, Any]
) -> None:
    """One of the survivors has no group with the dead rank but the world's. A new worker has no parameters yet."""
    url, config = tmp_path / "moved", {**FSDP2, "dropout": 0.2, "strict": strict, **built}
    moved = Run(url, with_a_rank_killed(crew, url, "tensor_parallel.train", config, where, tp=2), 2)
    plain = {**FSDP2, "dropout": 0.2, **(THERE if built else {})}
    whole = through(crew, tmp_path / "whole", plain, WHOLE, tp=1)
    assert _distance(whole.after(AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED


def test_a_style_that_cannot_be_undone_has_the_function_called_again(crew: Crew, tmp_path: Path) -> None:
    config = {**IN_LOOP, "plan": "foreign", "url": str(tmp_path)}
    more = {**of_run(config), "tp": 2}
    _assert_ended(crew.run([0, 1], "tensor_parallel.train", config, end_at=2, **more), "ended", 2)
    reason = "left: tp_plan has styles besides torch's own: what they do to a model cannot be undone"
    assert all(reason in crew.members[number].points for number in (0, 1))
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    again = crew.run([0, 1], "tensor_parallel.train", config, checkpoint=newest.id, **more)
    _assert_ended(again, "finished", LAST_STEP)


def test_ranks_of_a_cell_that_were_seeded_apart_are_refused(crew: Crew, tmp_path: Path) -> None:
    config = {**FSDP2, "seeded by": "tp", "url": str(tmp_path)}
    outcomes = crew.run(range(2), "tensor_parallel.train", config, **of_run(config), tp=2)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    said = "the ranks that share layers or experts have different values of embed.weight"
    assert all(said in outcome.result.message for outcome in outcomes)

"""Runs whose ranks share each layer by other numbers from one generation to the next, in the same processes: the oracle
is one rank with whole layers, undisturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
from cells import AT, LAST_STEP, WHOLE, Run
from crew import Crew, Outcome
from test_huggingface import LLAMA
from test_oracle import _assert_ended, _distance
from test_tensor_parallel import ALLOWED

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
# After the loss of one of four ranks that share layers by two: the ranks, and the last step (None: the end).
PARTS: Sequence[tuple[Sequence[int], int | None]] = (((3, 0, 2), 5), ((2, 3), 6), ((0, 3, 1, 2), None))


def through(
    crew: Crew,
    url: Path,
    function: str,
    config: dict[str, Any],
    sizes: tuple[int, ...],
    parts: Sequence[tuple[Sequence[int], int | None]] = PARTS,
    sp: int = 1,
) -> tuple[Run, set[str]]:
    """`sizes`: by how many ranks each layer is shared in each of `parts`. Also why functions have left their loop.
    `config["where"]`: the engine's call in which the rank is lost."""
    more = {**cells.of_run(config), "checkpoint_every_steps": 1, "tp_sizes": tuple(sorted({2, *sizes})), "sp": sp}
    given = {**config, "in_loop": True, "url": str(url)}
    cells.lose_a_rank(crew, url, function, given, config.get("where", "backward"), tp=2, **more)
    store, generations, left = CheckpointStore(str(url), "run"), list[list[Outcome]](), cells.left(crew)
    for (who, end_at), tp in zip(parts, sizes, strict=True):
        outcomes = crew.run(who, function, given, checkpoint=store.list()[0].id, end_at=end_at, tp=tp, **more)
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        generations.append(outcomes)
        left |= cells.left(crew)
    return Run(url, generations, sizes[-1]), left


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        *(pytest.param({"stage": stage}, (1, 2, 4), id=f"stage{stage}", marks=SLOW) for stage in (0, 2, 3)),
        pytest.param({"stage": 1, "dropout": 0.2}, (1, 2, 4), id="stage1-dropout"),
        pytest.param({"stage": 1, "fused": True}, (1, 2, 1), id="stage1-fused", marks=SLOW),
        pytest.param({"stage": 2, "where": "forward"}, (1, 2, 2), id="stage2-forward"),
        pytest.param({"stage": 1, "where": "step"}, (1, 2, 4), id="stage1-step", marks=SLOW),
        # No layer's slices have dropout in them: it is drawn alike on all ranks of a cell.
        pytest.param({"engine": "fsdp2", "dropout": 0.2}, (1, 2, 1), id="fsdp2-dropout"),
        pytest.param({"engine": "fsdp2", "compiled": True}, (1, 2, 1), id="fsdp2-compiled", marks=SLOW),
    ],
)
def test_a_run_goes_on_with_other_slices_in_the_same_processes(
    crew: Crew, tmp_path: Path, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    function = "tensor_parallel.train"
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", function, config, WHOLE), 1)
    moved, left = through(crew, tmp_path / "moved", function, config, sizes)
    assert _distance(whole.after(AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED
    spans = [span for outcome in moved.outcomes for report in outcome.reports for span in report.positions]
    positions = Counter(position for start, stop in spans for position in range(start, stop))
    # Those of the first generation were reported by ranks of which one is lost.
    assert positions == dict.fromkeys(range(AT * 10, 2 * cells.SIZE), 1)
    assert left == set(), "a model that was cut can be cut anew"


@pytest.mark.parametrize(
    ("function", "config", "sizes"),
    [
        # Of 20 words three cannot have as many each.
        ("tensor_parallel.train", {"engine": "fsdp2"}, (1, 3, 2)),
        # One head of keys and values is all that two could share.
        ("hugging_face.train", {**LLAMA, "stage": 1, "model": {"num_key_value_heads": 1}}, (1, 2, 1)),
        ("hugging_face.train", {**LLAMA, "stage": 3, "model": {"num_key_value_heads": 1}}, (1, 2, 1)),
    ],
)
def test_a_number_that_the_model_refuses_leaves_functions_in_their_loop(
    crew: Crew, tmp_path: Path, function: str, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    """`tp: any`: the next generation has another number, and computes what one rank does."""
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", function, config, WHOLE), 1)
    given = {**config, "in_loop": True, "url": str(tmp_path)}
    most = max(sizes)
    more = {**cells.of_run(config), "checkpoint_every_steps": 1, "tp_sizes": tuple(range(1, most + 1)), "any_tp": True}
    before, refused, after = sizes
    _assert_ended(crew.run(range(most), function, given, end_at=3, tp=before, **more), "ended", 3)
    newest = CheckpointStore(str(tmp_path), "run").list()[0].id
    for outcome in crew.run(range(most), function, given, checkpoint=newest, tp=refused, **more):
        assert (outcome.result.kind, outcome.clean) == ("mesh_refused", True), outcome.result
        assert f"tp: {refused}" in outcome.result.message
    left = cells.left(crew)
    done = crew.run(range(2), function, given, checkpoint=newest, tp=after, **more)
    _assert_ended(done, "finished", LAST_STEP)
    assert all(outcome.clean for outcome in done)
    assert left | cells.left(crew) == set()
    moved = Run(tmp_path, [done], after)
    assert _distance(whole.after(3), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED

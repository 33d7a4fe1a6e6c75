"""Ranks that share sequences and each layer at once, through other world sizes and lost ranks; the oracle is one rank
with whole sequences and whole layers, which equals plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import AT, WHOLE, Part, Run, assert_every_sample_once, with_a_rank_killed
from crew import Crew
from layered_model import EVEN
from sequence_model import loss_of
from sharing_model import Transformer, text
from test_another_tp_within_a_run import through as through_a_loss
from test_oracle import _distance
from test_tensor_parallel import ALLOWED, CLIPPING, STOP

import elastic

pytestmark = pytest.mark.processes
SLOW = pytest.mark.slow

CONFIG: dict[str, Any] = {"engine": "fsdp2", "sequences": True, "clipping": CLIPPING}
BOTH, ONE = {"sp": 2, "tp": 2}, {"sp": 1, "tp": 1}
# Whole cells of both, then sequences alone, then both again on other ranks.
PARTS: Sequence[Part] = (((0, 1, 2, 3), 3), ((2, 0), 5, {"tp": 1}), ((1, 3, 0, 2), None))
LISTED = {**BOTH, "tp_sizes": (1, 2)}


def through(
    crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Part], mesh: Mapping[str, Any] = BOTH
) -> Run:
    generations = cells.through(crew, url, "tensor_parallel.train", config, parts, anomalies=STOP, **mesh)
    return Run(url, generations, mesh["tp"])


def assert_equal(whole: Run, moved: Run) -> None:
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    assert min(norms.values()) > CLIPPING, "gradients were clipped"
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "of whole layers, once"


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"in_loop": True}, id="in-loop"),
        pytest.param({}, id="called-again", marks=SLOW),
        pytest.param({"in_loop": True, "plan": "own"}, id="by names", marks=SLOW),
        pytest.param({"recomputed": True, "fsdp2": {"shard": []}}, id="recomputed", marks=SLOW),
        pytest.param({"fsdp2": {"cpu_offload": True}}, id="offload", marks=SLOW),
    ],
)
def test_sequences_and_layers_shared_at_once_equal_one_rank_with_whole_ones(
    crew: Crew, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Heads of keys and values are fewer than ranks of a cell."""
    whole = through(crew, tmp_path / "whole", CONFIG, WHOLE, ONE)
    moved = through(crew, tmp_path / "moved", {**CONFIG, **way}, PARTS, LISTED)
    assert_equal(whole, moved)
    assert [dict(outcome.told["coordinates"]) for outcome in moved.outcomes[-4:]] == [
        {"dp": 0, "sp": part, "tp": lane, "ep": 0, "pp": 0} for part in (0, 1) for lane in (0, 1)
    ]
    (report,) = [report for report in moved.outcomes[0].reports if report.step == 2]
    calls = {(use.op, use.axis): use.calls for use in report.collectives}
    # 5 micro-batches of 2 layers: query, key, value and output, forth and back (made once more by a recomputation).
    assert calls["all_to_all_single", "sp"] == 5 * 2 * 8 * (3 if way.get("recomputed") else 2) // 2
    assert {("all_reduce", "tp"), ("all_gather_into_tensor", "dp")} <= calls.keys()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
def test_autotp_with_shared_sequences_equals_one_rank_with_whole_ones(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "sequences": True, "clipping": CLIPPING}
    whole = through(crew, tmp_path / "whole", config, WHOLE, ONE)
    assert_equal(whole, through(crew, tmp_path / "moved", config, PARTS, LISTED))


@pytest.mark.slow
@pytest.mark.parametrize("plain", [{"engine": "fsdp2", "in_loop": True}, {"stage": 2}, {"stage": 3}])
def test_cells_of_four_come_and_go(eight: Crew, tmp_path: Path, plain: dict[str, Any]) -> None:
    """Two of them, one of survivors of both, two again."""
    parts: Sequence[Part] = ((range(8), 3), ((5, 0, 6, 3), 5), ((1, 7, 0, 2, 6, 5, 3, 4), None))
    config = {**plain, "sequences": True, "clipping": CLIPPING}
    whole = through(eight, tmp_path / "whole", {**config, "in_loop": False}, WHOLE, ONE)
    assert_equal(whole, through(eight, tmp_path / "moved", config, parts))
    still = through(eight, tmp_path / "still", {**config, "dropout": 0.2, "in_loop": False}, [((0, 1, 2, 3), None)])
    moved = through(eight, tmp_path / "dropped", {**config, "dropout": 0.2}, parts)
    assert _distance(still.losses, moved.losses) <= ALLOWED
    assert _distance(still.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED


def test_dropout_differs_between_parts_and_not_between_slices(crew: Crew, tmp_path: Path) -> None:
    """No layer's slices have dropout in them."""
    config = {**CONFIG, "dropout": 0.2}
    alone = through(crew, tmp_path / "alone", config, [((0, 1), None)], {"sp": 2, "tp": 1})
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, PARTS, LISTED)
    assert _distance(alone.losses, moved.losses) <= ALLOWED
    assert _distance(alone.state(), moved.state(alone.shapes[0])) <= ALLOWED
    whole = through(crew, tmp_path / "whole", config, WHOLE, ONE)
    assert _distance(whole.losses, alone.losses) > 100 * ALLOWED, "parts draw their own"


@pytest.mark.parametrize(
    ("where", "strict"),
    [("backward", False), *(pytest.param(where, True, marks=SLOW) for where in ("forward", "step"))],
)
def test_survivors_of_a_killed_rank_stay_in_their_loop(crew: Crew, tmp_path: Path, where: str, strict: bool) -> None:
    """Rank 1 of the only cell: rank 2 shares no group with it but the world's, and rank 0 layers, rank 3 sequences."""
    url, config = tmp_path / "moved", {**CONFIG, "strict": strict}
    killed = with_a_rank_killed(crew, url, "tensor_parallel.train", config, where, {"tp": 1}, **LISTED)
    assert_goes_on(crew, CONFIG, Run(url, killed, 2), tmp_path / "whole")


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=SLOW)])
def test_a_run_with_autotp_goes_on_after_the_loss_of_a_rank(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "sequences": True, "clipping": CLIPPING}
    parts = (((3, 0), 5), ((2, 3), 6), ((0, 3, 1, 2), None))
    moved, left = through_a_loss(crew, tmp_path / "moved", "tensor_parallel.train", config, (1, 1, 2), parts, sp=2)
    assert not left
    assert_goes_on(crew, config, moved, tmp_path / "whole")


def assert_goes_on(crew: Crew, config: dict[str, Any], moved: Run, url: Path) -> None:
    whole = through(crew, url, config, WHOLE, ONE)
    assert _distance(whole.after(AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED


def test_what_cells_have_saved_is_exported_as_the_whole_model(crew: Crew, tmp_path: Path) -> None:
    run = through(crew, tmp_path, CONFIG, [((0, 1, 2, 3), 3)])
    folder = elastic.export(tmp_path / "run", tmp_path / "out", to="torch")
    whole = Transformer(**EVEN)
    whole.load_state_dict(torch.load(folder / "model.pt"))
    expected = run.state({name: tuple(value.shape) for name, value in whole.state_dict().items()})
    found = {key: key.split("/", 1)[1] for key in expected if key.startswith(("master/", "param/"))}
    assert found
    for key, name in found.items():
        assert torch.equal(whole.get_parameter(name).flatten().double(), expected[key]), name


@pytest.mark.slow
def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path) -> None:
    """What the oracle above is worth: losses and gradient norms."""
    one = through(crew, tmp_path, {**CONFIG, "schedule": False}, WHOLE, ONE)
    (outcome,) = one.outcomes
    torch.manual_seed(3)
    model = Transformer(**EVEN)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, norms = torch.optim.AdamW(parameters, lr=0.02), [], []
    for begin in range(0, len(outcome.indices), 10):
        step = outcome.indices[begin : begin + 10]
        optimizer.zero_grad()
        losses.append(0.0)
        for first in range(0, len(step), 2):
            samples = step[first : first + 2]
            words, labels = (torch.stack(part) for part in zip(*map(text, samples), strict=True))
            loss = loss_of(model(words), labels) * len(samples) / len(step)
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIPPING)))
        optimizer.step()
    assert [float(loss) for loss in one.losses.values()] == pytest.approx(losses, abs=ALLOWED)
    assert [report.grad_norm for report in outcome.reports] == pytest.approx(norms, rel=1e-4)

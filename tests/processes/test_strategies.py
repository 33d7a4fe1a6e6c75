"""Gradients that travel otherwise train alike: strategies against plain DeepSpeed, also through other worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from test_oracle import BATCH, CEILING, LAST_STEP, Run, _assert_ended, _assert_every_sample_once, _distance

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.policy.communication import EXACT
from elastic.core.settings import CommunicationSettings

pytestmark = pytest.mark.processes

# Ranks 0 and 2 share a node, and so do 1 and 3: neighbours in rank do not.
NODES = (0, 1, 0, 1)
# Of the model in `trainings`, in fp32.
_GRADIENT = 323 * 4


def _run(
    crew: Crew,
    url: Path,
    config: dict[str, Any],
    communication: CommunicationSettings | None,
    who: tuple[int, ...] = (0, 1, 2, 3),
    nodes: tuple[int, ...] = NODES,
    batch: BatchSettings = BATCH,
) -> Run:
    outcomes = crew.run(
        who,
        "train",
        {**config, "url": str(url)},
        batch=batch,
        max_world_size=4,
        communication=communication,
        nodes=nodes,
    )
    # 37 samples, ten in a step.
    _assert_ended(outcomes, "finished", -(-37 * batch.epochs // 10))
    return Run(url, [outcomes])


CASES = [
    pytest.param({"stage": 0}, id="stage0"),
    pytest.param({"stage": 1}, id="stage1"),
    pytest.param({"stage": 1, "zero": {"use_multi_rank_bucket_allreduce": False}}, id="stage1-owners"),
    pytest.param({"stage": 1, "zero": {"reduce_scatter": False}}, id="stage1-whole"),
    pytest.param(
        {"stage": 1, "zero": {"reduce_bucket_size": 50}, "top": {"prescale_gradients": True}}, id="stage1-small"
    ),
    pytest.param({"stage": 0, "dtype": "bf16"}, id="stage0-bf16"),
    pytest.param({"stage": 1, "dtype": "bf16"}, id="stage1-bf16"),
    pytest.param(
        {"stage": 1, "dtype": "bf16", "top": {"data_types": {"grad_accum_dtype": "fp32"}}}, id="stage1-fp32-sums"
    ),
]


@pytest.mark.parametrize("config", CASES)
def test_every_exact_strategy_is_plain_deepspeed(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    config = {**config, "dropout": 0.1}
    plain = _run(crew, tmp_path / "plain", config, None)
    for name in EXACT:
        # Several buckets, some of one tensor.
        run = _run(crew, tmp_path / name, config, CommunicationSettings(strategy=name, bucket_mb=0.0005))
        ceiling = CEILING[config.get("dtype", "fp32")]
        assert _distance(plain.state, run.state) <= ceiling, name
        assert _distance(plain.losses, run.losses) <= ceiling, name
        _assert_every_sample_once(run.outcomes)


def test_what_travels_is_in_the_ledger(crew: Crew, tmp_path: Path) -> None:
    """Hierarchical sends a half of the ring's bytes between two nodes of two ranks that are not neighbours in rank."""
    between = {}
    for name in ("ring", "hierarchical"):
        run = _run(crew, tmp_path / name, {"stage": 1}, CommunicationSettings(strategy=name))
        rows = {(use.op, use.axis): use for use in run.outcomes[0].reports[-1].collectives}
        between[name] = rows["send", "nodes"].bytes
        assert all(0.0 <= use.waited_s <= use.seconds for use in rows.values())
        # The engine's own reductions are gone; what is left of them is the norm.
        assert rows["all_reduce", "dp"].bytes <= 16
        sent = sum(use.bytes for (op, _), use in rows.items() if op == "send")
        assert sent == pytest.approx(2 * 3 / 4 * _GRADIENT, abs=32), "what any all-reduce of four sends"
    assert between["hierarchical"] == pytest.approx(_GRADIENT / 2, abs=16)
    assert between["ring"] == pytest.approx(3 * _GRADIENT / 2, abs=16)


@pytest.mark.parametrize(("strategy", "in_loop"), [("auto", False), ("hierarchical", False), ("auto", True)])
def test_through_other_world_sizes_as_the_undisturbed_run(
    crew: Crew, tmp_path: Path, strategy: str, in_loop: bool
) -> None:
    # All strategies take turns in the steps of such short generations.
    config, settings = {"stage": 1, "dropout": 0.1}, CommunicationSettings(strategy=strategy, check_every_steps=1)
    still = _run(crew, tmp_path / "still", config, None)
    url, generations, checkpoint = tmp_path / "moved", [], None
    config |= {"in_loop": in_loop}
    for who, nodes, end_at in (
        ((0, 1, 2, 3), NODES, 2),
        # Nodes of unlike size: every rank is a part of its own.
        ((2, 0, 3), (0, 0, 1), 4),
        ((3,), (0,), 6),
        ((1, 3), (0, 0), None),
    ):
        outcomes = crew.run(
            who, "train", {**config, "url": str(url)}, end_at=end_at, batch=BATCH, max_world_size=4,
            checkpoint=checkpoint, communication=settings, nodes=nodes,
        )  # fmt: skip
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert [(outcome.clean, outcome.sockets) for outcome in outcomes] == [(True, [])] * len(who)
        told = [report.travel for report in outcomes[0].reports if report.travel]
        assert len(told) >= 1
        assert all(outcome.reports[-1].travel == "" for outcome in outcomes[1:]), "rank 0's are enough"
        checkpoint = CheckpointStore(str(url), "run").list()[0].id
        generations.append(outcomes)
    moved = Run(url, generations)
    assert _distance(still.state, moved.state) <= CEILING["fp32"]
    assert _distance(still.losses, moved.losses) <= CEILING["fp32"]
    _assert_every_sample_once(moved.outcomes)


def test_a_strategy_changes_in_mid_run_with_the_links(crew: Crew, tmp_path: Path) -> None:
    config, batch = {"stage": 1, "dropout": 0.1}, BatchSettings(epochs=12)
    plain = _run(crew, tmp_path / "plain", config, None, batch=batch)
    outcomes = crew.run(
        range(4), "train_while_links_change", {**config, "url": str(tmp_path / "moved")}, batch=batch,
        max_world_size=4, communication=CommunicationSettings(check_every_steps=4), nodes=NODES,
    )  # fmt: skip
    _assert_ended(outcomes, "finished", 45)
    told = {report.step: report.travel.split(":")[0] for report in outcomes[0].reports if report.travel}
    # All twice, the ring three times more. Slow from the 21st step on, after which the others are no worse than it:
    # each once, and the one that came near three times.
    assert told == {1: "each in turn", 12: "ring", 33: "hierarchical"}
    sent = {report.step: {use.op for use in report.collectives} for report in outcomes[0].reports}
    assert "send" not in sent[5], "by the backend's own"
    assert all("send" in sent[step] for step in (*range(12, 24), *range(33, 46)))
    moved = Run(tmp_path / "moved", [outcomes])
    assert _distance(plain.state, moved.state) <= CEILING["fp32"]
    assert _distance(plain.losses, moved.losses) <= CEILING["fp32"]


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        ({"stage": 2}, CommunicationSettings(), "communication: in stage 2 partial sums lie on other ranks"),
        ({"stage": 3}, CommunicationSettings(), "communication: in stage 3 partial sums lie on other ranks"),
        ({"stage": 1, "dtype": "fp16"}, CommunicationSettings(), "communication: fp16 scales them by a loss scale"),
        ({"stage": 0, "top": {"communication_data_type": "bf16"}}, CommunicationSettings(), "remove one of them"),
        ({"stage": 0}, CommunicationSettings(strategy="star"), "communication.strategy is 'star', but"),
    ],
)
def test_what_cannot_be_done_is_refused(
    crew: Crew, tmp_path: Path, config: dict[str, Any], settings: CommunicationSettings, sentence: str
) -> None:
    outcomes = crew.run([0, 1], "train", {**config, "url": str(tmp_path)}, batch=BATCH, communication=settings)
    for outcome in outcomes:
        assert outcome.result.kind == "usage_error", outcome.result
        assert sentence in outcome.result.message

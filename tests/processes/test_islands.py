"""Training in islands against the same algorithm in plain torch, undisturbed, killed and resized."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from convex import DIMENSIONS, objective, optimum
from crew import Crew, Outcome
from islands import Oracle

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.rounds import islands_of
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings, CommunicationSettings

pytestmark = pytest.mark.processes

STEPS = 14
LOCAL_SGD = CommunicationSettings("local", "local_sgd", every_steps=4)
DILOCO = CommunicationSettings("local", "diloco", every_steps=4)
STREAMING = CommunicationSettings("local", "streaming_diloco", every_steps=4, fragments=2)
OTHERS = (LOCAL_SGD.strategy, STREAMING.strategy)


def _run(
    crew: Crew, url: Path, settings: CommunicationSettings | None, nodes: tuple[int, ...], steps: int = STEPS,
    config: dict[str, Any] | None = None, **more: Any,
) -> list[Outcome]:  # fmt: skip
    outcomes = crew.run(
        range(len(nodes)), "islands.train", {"optimizer": "adamw", **(config or {}), "url": str(url)},
        batch=BatchSettings(max_steps=steps), max_world_size=4, communication=settings, nodes=nodes, **more,
    )  # fmt: skip
    kind = "ended" if "end_at" in more else "finished"
    assert {outcome.result.kind for outcome in outcomes} == {kind}, outcomes[0].result.traceback
    assert all(outcome.clean and not outcome.sockets for outcome in outcomes)
    return outcomes


def _distance(told: list[Outcome], expected: dict[str, torch.Tensor]) -> float:
    """Of every rank's weights, relative to the tensor's largest element."""
    return max(
        float((outcome.told["weights"][name] - tensor).abs().max() / tensor.abs().max())
        for outcome in told
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("settings", [LOCAL_SGD, DILOCO, STREAMING], ids=lambda s: s.strategy)
def test_undisturbed_is_the_algorithm_in_plain_torch(
    crew: Crew, tmp_path: Path, settings: CommunicationSettings, nodes: tuple[int, ...]
) -> None:
    """With islands of unlike size, and steps that do not come out even."""
    told = _run(crew, tmp_path, settings, nodes)
    expected = Oracle(settings, "adamw", STEPS).run(islands_of(nodes), STEPS)
    assert _distance(told, expected) < 2e-5


def test_gradients_are_clipped_by_the_norm_within_the_island(crew: Crew, tmp_path: Path) -> None:
    """Between islands not even the norm travels."""
    nodes, clip = (0, 0, 1), 0.05
    config = {"optimizer": "sgd", "top": {"gradient_clipping": clip}}
    told = _run(crew, tmp_path, DILOCO, nodes, config=config)
    assert _distance(told, Oracle(DILOCO, "sgd", STEPS, clip).run(islands_of(nodes), STEPS)) < 2e-5
    across = {use.axis for report in told[0].reports for use in report.collectives if report.step in (5, 6, 7)}
    assert across == {"node, 2 ranks"}


def test_local_sgd_with_rounds_of_one_step_is_exact(crew: Crew, tmp_path: Path) -> None:
    """With plain SGD the mean of the weights is the step of the mean gradient, whatever the islands' sizes."""
    config, every_step = {"optimizer": "sgd"}, CommunicationSettings("local", "local_sgd", every_steps=1)
    exact = _run(crew, tmp_path / "exact", None, (0, 0, 1), config=config)
    local = _run(crew, tmp_path / "local", every_step, (0, 0, 1), config=config)
    assert _distance(local, exact[0].told["weights"]) < 2e-6


def _saved(url: Path) -> list[int]:
    return sorted(found.step for found in CheckpointStore(str(url), "run").list())


def test_what_is_due_in_a_round_is_saved_after_it(crew: Crew, tmp_path: Path) -> None:
    """By the cadence, and because the user asks."""
    _run(crew, tmp_path / "cadence", DILOCO, (0, 1), steps=10, checkpoint_every_steps=3)
    assert _saved(tmp_path / "cadence") == [4, 8, 10], "due after 3, 6 and 9; the run's last step is an outer one"
    _run(crew, tmp_path / "asked", DILOCO, (0, 1), steps=10, config={"asks": 5})
    assert _saved(tmp_path / "asked") == [8, 10]


@pytest.mark.parametrize(
    "settings", [DILOCO, pytest.param(STREAMING, marks=pytest.mark.slow)], ids=["diloco", "streaming"]
)
def test_a_loss_inside_a_round_goes_back_to_the_last_outer_step(
    crew: Crew, tmp_path: Path, settings: CommunicationSettings
) -> None:
    """Each island then has its own optimizer state again, and every sample of the round is dealt again."""
    nodes = (0, 0, 1)
    common: dict[str, Any] = {"batch": BatchSettings(max_steps=STEPS), "max_world_size": 4, "nodes": nodes}
    common |= {"communication": settings, "checkpoint_every_steps": 1}
    config = {"optimizer": "adamw", "url": str(tmp_path)}
    crew.begin(range(3), "islands.train", {**config, "stays": (2, 7)}, **common)
    crew.reached(2, "stays")
    newest = 4 if settings is DILOCO else 7
    crew.reached(0, f"committed step {newest}")
    crew.members[2].signal(signal.SIGKILL)
    survivors = [crew.outcome(number) for number in (0, 1)]
    assert {outcome.result.kind for outcome in survivors} == {"collective_failed"}
    crew.replace(2)
    (found,) = [entry.id for entry in CheckpointStore(str(tmp_path), "run").list() if entry.step == newest]
    told = _run(crew, tmp_path, settings, nodes, checkpoint=found)
    assert _distance(told, Oracle(settings, "adamw", STEPS).run(islands_of(nodes), STEPS)) < 2e-5
    steps = [report.step for report in told[0].reports]
    assert steps == list(range(newest + 1, STEPS + 1)), "each step of the broken round once more, none twice"


_MOVES: list[tuple[tuple[int, ...], int | None]] = [((0, 1, 0, 1), 4), ((0, 1, 2), 8), ((0, 0), 10), ((0, 0, 1), None)]


@pytest.mark.parametrize(("settings", "in_loop"), [(DILOCO, True), (STREAMING, False)], ids=["diloco", "streaming"])
def test_islands_come_and_go(crew: Crew, tmp_path: Path, settings: CommunicationSettings, in_loop: bool) -> None:
    """2, 3, 1 and 2 islands: outer weights and momentum stay, a new island has a peer's optimizer state."""
    config = {"in_loop": in_loop}
    oracle, checkpoint, steps = Oracle(settings, "adamw", 16), None, 16
    for nodes, end_at in _MOVES:
        if settings is DILOCO and end_at == 10:
            # Within a round it could not stop.
            end_at = 12
        ends = {} if end_at is None else {"end_at": end_at}
        told = _run(crew, tmp_path, settings, nodes, steps, config, checkpoint=checkpoint, **ends)
        expected = oracle.run(islands_of(nodes), end_at or steps)
        checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
        (said,) = [report.travel for report in told[0].reports if report.travel]
        assert ("kept is dropped" in said) == (nodes == (0, 0))
    assert _distance(told, expected) < 2e-5


def test_a_bad_gradient_of_one_island_is_skipped_by_all(crew: Crew, tmp_path: Path) -> None:
    config = {"optimizer": "adamw", "bad": (1, 5)}
    told = _run(crew, tmp_path, DILOCO, (0, 1), config=config, anomalies=AnomalySettings("skip"))
    for outcome in told:
        assert [report.step for report in outcome.reports if report.anomaly] == [6]
    assert all(bool(tensor.isfinite().all()) for tensor in told[0].told["weights"].values())
    assert _distance(told, told[1].told["weights"]) == 0.0


def test_the_ledger_shows_that_little_travels_between_islands(crew: Crew, tmp_path: Path) -> None:
    told = _run(crew, tmp_path, DILOCO, (0, 0, 1, 1), steps=8)
    numel = sum(tensor.numel() for tensor in told[0].told["weights"].values())
    across = {
        report.step: sum(use.bytes for use in report.collectives if use.axis == "nodes, 2 ranks")
        for report in told[0].reports
    }
    # A half of the fp32 weights, and a count, from each rank of an island.
    assert {step: size for step, size in across.items() if size} == {
        step: pytest.approx(4 * (numel / 2 + 1), abs=4) for step in (4, 8)
    }
    (remark,) = [report.travel for report in told[0].reports if report.travel]
    assert remark == "diloco: 2 islands of 2 and 2 ranks, an outer step every 4 steps"


def test_an_exchange_that_is_under_way_for_a_step(crew: Crew, tmp_path: Path) -> None:
    """Nothing is saved while it is; the run ends with equal weights everywhere, and resumes as if it had not ended."""
    late = CommunicationSettings("local", "streaming_diloco", every_steps=4, fragments=2, overlap_steps=1)
    still = _run(crew, tmp_path / "still", late, (0, 0, 1), checkpoint_every_steps=1)
    assert not {2, 4, 6, 8} & set(_saved(tmp_path / "still"))
    assert _distance(still, still[2].told["weights"]) == 0.0
    _run(crew, tmp_path / "moved", late, (0, 0, 1), end_at=7)
    checkpoint = CheckpointStore(str(tmp_path / "moved"), "run").list()[0].id
    again = _run(crew, tmp_path / "moved", late, (0, 0, 1), checkpoint=checkpoint)
    assert _distance(again, still[0].told["weights"]) < 2e-6


def test_bf16_has_fp32_masters_in_islands(crew: Crew, tmp_path: Path) -> None:
    config = {"optimizer": "adamw", "top": {"bf16": {"enabled": True}}}
    still = _run(crew, tmp_path / "still", DILOCO, (0, 0, 1), config=config)
    assert _distance(still, still[2].told["weights"]) == 0.0
    _run(crew, tmp_path / "moved", DILOCO, (0, 0, 1), config=config, end_at=8)
    checkpoint = CheckpointStore(str(tmp_path / "moved"), "run").list()[0].id
    again = _run(crew, tmp_path / "moved", DILOCO, (0, 0, 1), config=config, checkpoint=checkpoint)
    assert _distance(again, still[0].told["weights"]) == 0.0


@pytest.mark.parametrize("settings", [None, LOCAL_SGD, CommunicationSettings("error_feedback", "int8")])
def test_what_islands_keep_is_not_dropped(crew: Crew, tmp_path: Path, settings: CommunicationSettings | None) -> None:
    _run(crew, tmp_path, DILOCO, (0, 1), end_at=4)
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
    outcomes = crew.run(
        (0, 1), "islands.train", {"optimizer": "adamw", "url": str(tmp_path)}, batch=BatchSettings(max_steps=STEPS),
        max_world_size=4, communication=settings, nodes=(0, 1), checkpoint=checkpoint,
    )  # fmt: skip
    for outcome in outcomes:
        assert outcome.result.kind == "usage_error", outcome.result
        assert "resume the run with the communication that it had" in outcome.result.message


# -- what the tier promises, on a convex problem -----------------------------------------------------------------------


def _left(crew: Crew, url: Path, settings: CommunicationSettings, batch: int) -> float:
    """The share of the way to the optimum that is left after 240 steps of SGD on two islands, the last 120 at a lower
    rate where batches are not full."""
    ridge = 0.05
    config = {"stage": 0, "lr": 0.3, "batch": batch, "micro": batch // 2, "ridge": ridge}
    outcomes = crew.run(
        (0, 1), "convex.train", {**config, "url": str(url)}, batch=BatchSettings(max_steps=240), max_world_size=4,
        communication=settings, nodes=(0, 1),
    )  # fmt: skip
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    least, begun = optimum(ridge), objective(torch.zeros(DIMENSIONS), ridge)
    return (float(outcomes[0].told["objective"]) - least) / (begun - least)


@pytest.mark.parametrize("name", [DILOCO.strategy, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_islands_come_to_the_optimum_but_for_what_rounds_cost(crew: Crew, tmp_path: Path, name: str) -> None:
    """Strongly convex, each island with its half of every batch: nearer with short rounds than with long ones."""
    more = {"fragments": 1} if name == "streaming_diloco" else {}
    short, long = (
        _left(crew, tmp_path / str(every), CommunicationSettings("local", name, every_steps=every, **more), 960)
        for every in (2, 60)
    )
    assert short < 1e-3, (short, long)
    assert short < long < 2e-2, (short, long)

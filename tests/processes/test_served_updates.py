"""Runs whose updates are made by a parameter server, against plain torch: undisturbed, killed, resized."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from convex import DIMENSIONS, objective, optimum
from crew import Crew, Outcome
from islands import BATCH, Net
from server_ranks import servers
from test_bounded_staleness import CLIP, STEPS, expected

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.steps import join
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings, CommunicationSettings

pytestmark = pytest.mark.processes

SERVED = CommunicationSettings("async", "parameter_server", staleness=2, every_steps=5)
EXACT = CommunicationSettings("async", "parameter_server", staleness=0, every_steps=5)
# Clipping that bites, and a rate of each step's own.
CONFIG: dict[str, Any] = {"optimizer": "adamw", "decays": True, "top": {"gradient_clipping": CLIP}}


def _told(
    url: Path, nodes: tuple[int, ...], made: list[Any], settings: CommunicationSettings, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    told = {**CONFIG, **config, "url": str(url), "servers": [address for address, _ in made]}
    common = {"batch": BatchSettings(max_steps=STEPS), "max_world_size": 4, "communication": settings, "nodes": nodes}
    return told, common


def _run(
    crew: Crew, url: Path, nodes: tuple[int, ...], made: list[Any], settings: CommunicationSettings = EXACT, **more: Any
) -> list[Outcome]:
    config, common = _told(url, nodes, made, settings, more.pop("config", {}))
    outcomes = crew.run(range(len(nodes)), "islands.train", config, **{**common, **more})
    kind = "ended" if "end_at" in more else "finished"
    assert {outcome.result.kind for outcome in outcomes} == {kind}, outcomes[0].result.traceback
    assert all(outcome.clean and not outcome.sockets for outcome in outcomes)
    return outcomes


def _distance(outcomes: list[Outcome], weights: list[torch.Tensor]) -> float:
    return max(
        float((own - tensor).abs().max() / tensor.abs().max())
        for outcome in outcomes
        for own, tensor in zip(outcome.told["weights"].values(), weights, strict=True)
    )


def _saved(url: Path) -> list[int]:
    return sorted(found.step for found in CheckpointStore(str(url), "run").list())


def _newest(url: Path) -> str:
    return CheckpointStore(str(url), "run").list()[0].id


def _steps(outcome: Outcome) -> list[int]:
    return [report.step for report in outcome.reports]


@pytest.mark.parametrize(("optimizer", "clip"), [("sgd", CLIP), ("adamw", CLIP), ("adamw", None)])
def test_without_staleness_it_is_plain_torch(crew: Crew, tmp_path: Path, optimizer: str, clip: float | None) -> None:
    with servers(2) as made:
        config = {"optimizer": optimizer, "top": {"gradient_clipping": clip or 0.0}}
        told = _run(crew, tmp_path, (0, 0, 1), made, config=config)
    assert _distance(told, expected(0, 5, optimizer, clip=clip)) < 2e-5
    (remark,) = [report.travel for report in told[0].reports if report.travel]
    assert remark.startswith("parameter_server: at most 0 updates are missing")
    numbers = sum(parameter.numel() for parameter in Net().parameters())
    second, fifth = (
        {use.op: use.bytes for use in told[0].reports[step - 1].collectives if use.axis == "servers"} for step in (2, 5)
    )
    assert second == {"push": 4 * numbers, "pull": 4 * numbers}
    # The end of a round brings the optimizer's state too; counters of steps are a few numbers.
    state = {"sgd": 1, "adamw": 3}[optimizer] * 4 * numbers
    assert fifth["push"] == 4 * numbers
    assert state <= fifth["pull"] < state + 200


def test_a_rank_goes_on_while_another_stands_still(crew: Crew, tmp_path: Path) -> None:
    """Rank 1 stands still before step 8. Rank 0 sends the gradients of 8, 9 and 10, and waits for update 8."""
    far = CommunicationSettings("async", "parameter_server", staleness=2, every_steps=30)
    with servers(2) as made:
        config, common = _told(tmp_path, (0, 1), made, far, {"stays": (1, 7), "points": True})
        crew.begin((0, 1), "islands.train", config, **common)
        crew.reached(1, "stays")
        crew.reached(0, "begins step 10")
        crew.in_collective(0)
        crew.abort(0, "the test is over")
        outcome = crew.outcome(0)
    assert outcome.result.kind == "ended"
    assert _steps(outcome) == list(range(1, 10))


def test_a_rank_is_lost_and_then_a_server(crew: Crew, tmp_path: Path) -> None:
    """Each time the run goes on with what is left, and ends as if nothing had been."""
    with servers(3) as made:
        config, common = _told(tmp_path, (0, 1, 2), made, EXACT, {"stays": (2, 7)})
        crew.begin((0, 1, 2), "islands.train", config, checkpoint_every_steps=1, **common)
        crew.reached(2, "stays")
        crew.reached(0, "committed step 5")
        crew.members[2].signal(signal.SIGKILL)
        for number in (0, 1):
            crew.in_collective(number)
            crew.abort(number, "worker 2 is lost")
        assert {crew.outcome(number).result.kind for number in (0, 1)} == {"ended"}
        assert _saved(tmp_path) == [5], "within a round nothing is saved"

        config, common = _told(tmp_path, (0, 1), made, EXACT, {"stays": (1, 11)})
        crew.begin((0, 1), "islands.train", config, checkpoint_every_steps=1, checkpoint=_newest(tmp_path), **common)
        crew.reached(1, "stays")
        crew.reached(0, "committed step 10")
        made[1][1].kill()
        outcome = crew.outcome(0)
        assert outcome.result.kind == "collective_failed"
        assert "shard" in outcome.result.message
        crew.replace(1)

        told = _run(crew, tmp_path, (0, 0), made, checkpoint=_newest(tmp_path))
    assert _distance(told, expected(0, 5)) < 2e-5
    assert _steps(told[0]) == list(range(11, STEPS + 1))


@pytest.mark.parametrize(("saved", "done", "in_loop"), [(5, 8, True), (5, 8, False), (0, 3, False)])
def test_after_the_loss_of_a_node_the_run_goes_on_from_the_other_servers(
    crew: Crew, tmp_path: Path, saved: int, done: int, in_loop: bool
) -> None:
    """The worker and the server of a node are killed after `done` steps; the run was saved after `saved`, or never.
    The steps between are taken over: ranks report them as if they had made them, and nobody computes them again."""
    told = {"stays": (2, done), "in_loop": in_loop, "points": True}
    with servers(3) as made:
        config, common = _told(tmp_path, (0, 1, 2), made, EXACT, told)
        crew.begin((0, 1, 2), "islands.train", config, checkpoint_every_steps=1, **common)
        crew.reached(2, "stays")
        for step in (saved,) if saved else ():
            crew.reached(0, f"committed step {step}")
        for number in (0, 1):
            crew.reached(number, f"begins step {done + 1}")
        crew.members[2].signal(signal.SIGKILL)
        made[2][1].kill()
        for number in (0, 1):
            crew.abort(number, "node 2 is lost")
        lost = [crew.outcome(number).result.kind for number in (0, 1)]
        assert set(lost) <= {"ended", "collective_failed"}
        told = {"in_loop": in_loop, "points": True}
        left = _run(crew, tmp_path, (0, 1), made, config=told, checkpoint=_newest(tmp_path) if saved else None)
    assert _distance(left, expected(0, 5)) < 2e-5
    for number, outcome in enumerate(left):
        assert _steps(outcome) == list(range(saved + 1, STEPS + 1))
        begun = [point for point in crew.members[number].points if point.startswith("begins")]
        assert begun[0] == f"begins step {done + 1}"
    assert f"updates {saved + 1} to {done} are taken over" in left[0].reports[done - saved].travel
    for at, step in enumerate(range(saved, STEPS)):
        positions = (part for outcome in left for part in outcome.reports[at].positions)
        assert join(positions) == ((step * BATCH, (step + 1) * BATCH),)


def test_what_was_taken_over_survives_the_next_loss(crew: Crew, tmp_path: Path) -> None:
    """Node 2 is lost in step 9 and node 1 in step 10, and nothing was saved since step 5."""
    checkpoint, nodes = None, (0, 1, 2)
    with servers(3) as made:
        for done in (8, 9):
            config, common = _told(tmp_path, nodes, made, EXACT, {"stays": (nodes[-1], done), "points": True})
            crew.begin(nodes, "islands.train", config, checkpoint_every_steps=1, checkpoint=checkpoint, **common)
            crew.reached(nodes[-1], "stays")
            if checkpoint is None:
                crew.reached(0, "committed step 5")
            for number in nodes:
                crew.reached(number, f"begins step {done + 1}")
            crew.members[nodes[-1]].signal(signal.SIGKILL)
            made[nodes[-1]][1].kill()
            nodes, checkpoint = nodes[:-1], _newest(tmp_path)
            for number in nodes:
                crew.abort(number, "a node is lost")
                crew.outcome(number)
        assert _saved(tmp_path) == [5]
        (left,) = _run(crew, tmp_path, nodes, made, config={"points": True}, checkpoint=checkpoint)
    assert _distance([left], expected(0, 5)) < 2e-5
    assert crew.members[0].points[0] == "begins step 10"
    assert [report.positions for report in left.reports] == [
        ((step * BATCH, (step + 1) * BATCH),) for step in range(5, STEPS)
    ]


def test_where_both_copies_of_a_shard_are_lost_the_run_goes_back_to_what_was_saved(crew: Crew, tmp_path: Path) -> None:
    with servers(3) as made:
        config, common = _told(tmp_path, (0, 1, 2), made, EXACT, {"stays": (2, 8)})
        crew.begin((0, 1, 2), "islands.train", config, checkpoint_every_steps=1, **common)
        crew.reached(2, "stays")
        crew.reached(0, "committed step 5")
        for number in (1, 2):
            crew.members[number].signal(signal.SIGKILL)
            made[number][1].kill()
        crew.abort(0, "two nodes are lost")
        crew.outcome(0)
        told = _run(crew, tmp_path, (0,), made, config={"points": True}, checkpoint=_newest(tmp_path))
    assert _distance(told, expected(0, 5)) < 2e-5
    assert crew.members[0].points[0] == "begins step 6"


def test_another_number_of_ranks_and_other_semantics(crew: Crew, tmp_path: Path) -> None:
    """From a checkpoint of a parameter server to synchronous training, and back."""
    plain = CommunicationSettings("exact", "all_reduce")
    checkpoint = None
    with servers(3) as made:
        for nodes, settings, end_at in (((0,), EXACT, 5), ((0, 1, 1, 2), EXACT, 8), ((0, 1), plain, 10)):
            _run(crew, tmp_path, nodes, made, settings, checkpoint=checkpoint, end_at=end_at)
            checkpoint = _newest(tmp_path)
        told = _run(crew, tmp_path, (0, 1, 2), made, checkpoint=checkpoint)
    assert _distance(told, expected(0, 5)) < 2e-5


def test_a_script_that_ends_within_a_round_loses_no_gradient(crew: Crew, tmp_path: Path) -> None:
    """With staleness too: both end after update 13, of gradients that the other may have computed otherwise."""
    with servers(2) as made:
        config = {"leaves": 13, "decays": False}
        told = _run(crew, tmp_path, (0, 1), made, EXACT, config=config, batch=BatchSettings())
        config = {"decays": False}
        known = _run(crew, tmp_path / "known", (0, 1), made, config=config, batch=BatchSettings(max_steps=13))
    assert _saved(tmp_path) == [13]
    assert _distance(told, list(known[0].told["weights"].values())) == 0.0


def test_a_gradient_that_is_not_finite_is_not_sent(crew: Crew, tmp_path: Path) -> None:
    """The others wait for it until the run's controller ends the generation."""
    with servers(2) as made:
        config, common = _told(tmp_path, (0, 1), made, SERVED, {"bad": (1, 6)})
        crew.begin((0, 1), "islands.train", config, anomalies=AnomalySettings("rollback"), **common)
        bad = crew.outcome(1).result
        crew.in_collective(0)
        crew.abort(0, "step 7 is bad")
        assert crew.outcome(0).result.kind == "ended"
    assert bad.kind == "anomaly"
    assert bad.bad_step.positions == ((6 * BATCH, 7 * BATCH),)


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"top": {"bf16": {"enabled": True}}}, "fp32"), ({"servers": None}, "is for runs on a cluster")],
)
def test_what_cannot_be_honoured_is_refused(crew: Crew, tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    config, common = _told(tmp_path, (0,), [(("127.0.0.1", 1), None)], EXACT, {})
    config |= changed
    (outcome,) = crew.run((0,), "islands.train", config, **common)
    assert outcome.result.kind == "usage_error"
    assert why in outcome.result.message


def test_it_comes_to_the_optimum(crew: Crew, tmp_path: Path) -> None:
    """Strongly convex, full batches."""
    ridge, settings = 0.05, CommunicationSettings("async", "parameter_server", staleness=3, every_steps=60)
    with servers(2) as made:
        config = {"stage": 0, "lr": 0.3, "batch": 960, "micro": 480, "ridge": ridge, "url": str(tmp_path)}
        outcomes = crew.run(
            (0, 1), "convex.train", {**config, "servers": [address for address, _ in made]},
            batch=BatchSettings(max_steps=240), max_world_size=4, communication=settings, nodes=(0, 1),
        )  # fmt: skip
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    least, begun = optimum(ridge), objective(torch.zeros(DIMENSIONS), ridge)
    left = (float(outcomes[0].told["objective"]) - least) / (begun - least)
    assert left < 1e-3, left

"""Gradients that are applied some steps late, against plain torch: undisturbed, killed, resized."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from convex import DIMENSIONS, SAMPLES, objective, optimum, problem
from crew import Crew, Outcome
from islands import BATCH, Net, decay_of, optimizer_of
from test_oracle import state_of
from torch.nn.functional import binary_cross_entropy_with_logits

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.samples import SampleOrder
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings, CommunicationSettings

pytestmark = pytest.mark.processes

STEPS, CLIP = 14, 0.05
LATE = CommunicationSettings("async", staleness=2, every_steps=5)
# Clipping that bites, momentum, and a rate of each step's own.
CONFIG: dict[str, Any] = {"optimizer": "adamw", "decays": True, "top": {"gradient_clipping": CLIP}}


def expected(
    staleness: int, every: int, optimizer: str = "adamw", skipped: int | None = None, clip: float | None = CLIP
) -> list[torch.Tensor]:
    """One process. The gradient of step `skipped` is not applied."""
    model, order, (x, y) = Net(), SampleOrder(SAMPLES, 0), problem()
    update = optimizer_of(model, optimizer)
    decay = decay_of(update)
    # Without a gradient it does nothing; torch's scheduler asks for it.
    update.step()
    under_way: list[tuple[int, float, list[torch.Tensor]]] = []
    for step in range(1, STEPS + 1):
        rows = order.indices((step - 1) * BATCH, step * BATCH)
        loss = binary_cross_entropy_with_logits(model(x[rows]), y[rows])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        under_way.append((step, update.param_groups[0]["lr"], list(gradient)))
        ends, judged = step == STEPS or step % every == 0, True
        while len(under_way) > (0 if ends else staleness):
            number, rate, gradient = under_way.pop(0)
            if number == skipped:
                judged = False
                continue
            for parameter, value in zip(model.parameters(), gradient, strict=True):
                parameter.grad = value.clone()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            now, update.param_groups[0]["lr"] = update.param_groups[0]["lr"], rate
            update.step()
            update.param_groups[0]["lr"] = now
        if judged:
            # A step that is skipped does not move DeepSpeed's scheduler.
            decay.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _begin(url: Path, settings: CommunicationSettings, ranks: int, config: dict[str, Any], **more: Any) -> Any:
    common = {"batch": BatchSettings(max_steps=STEPS), "max_world_size": 4, "communication": settings, **more}
    return (range(ranks), "islands.train", {**CONFIG, **config, "url": str(url)}), common


def _run(
    crew: Crew, url: Path, settings: CommunicationSettings = LATE, ranks: int = 3, config: dict[str, Any] | None = None,
    **more: Any,
) -> list[Outcome]:  # fmt: skip
    told, common = _begin(url, settings, ranks, config or {}, **more)
    outcomes = crew.run(*told, **common)
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


def _state(url: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(str(url), "run")
    return state_of(store, store.manifest(store.list()[0].id))


def _newest(url: Path) -> str:
    return CheckpointStore(str(url), "run").list()[0].id


@pytest.mark.parametrize(("staleness", "every"), [(0, 5), (1, 30), (2, 5)])
def test_undisturbed_is_the_algorithm_in_plain_torch(crew: Crew, tmp_path: Path, staleness: int, every: int) -> None:
    settings = CommunicationSettings("async", staleness=staleness, every_steps=every)
    told = _run(crew, tmp_path, settings)
    assert _distance(told, expected(staleness, every)) < 2e-5
    (remark,) = [report.travel for report in told[0].reports if report.travel]
    assert remark.startswith(f"bounded_staleness: gradients are applied {staleness} steps late")


def test_without_a_delay_it_is_synchronous(crew: Crew, tmp_path: Path) -> None:
    exact = _run(crew, tmp_path / "exact", CommunicationSettings("exact", "all_reduce"))
    late = _run(crew, tmp_path / "late", CommunicationSettings("async", staleness=0))
    assert _distance(late, list(exact[0].told["weights"].values())) < 2e-6


def test_a_rank_goes_on_while_another_stands_still(crew: Crew, tmp_path: Path) -> None:
    """Rank 1 stands still before step 8. Rank 0 hands in 8 and 9; in step 10 it waits for the mean of step 8."""
    settings = CommunicationSettings("async", staleness=2, every_steps=30)
    told, common = _begin(tmp_path, settings, 2, {"stays": (1, 7), "points": True})
    crew.begin(*told, **common)
    crew.reached(1, "stays")
    crew.reached(0, "begins step 10")
    crew.members[1].signal(signal.SIGKILL)
    outcome = crew.outcome(0)
    assert outcome.result.kind == "collective_failed"
    assert [report.step for report in outcome.reports] == list(range(1, 10))


@pytest.mark.parametrize("in_loop", [True, False])
def test_a_loss_within_a_round_goes_back_to_its_beginning(crew: Crew, tmp_path: Path, in_loop: bool) -> None:
    """And ends as if nothing had been lost, at another world size."""
    told, common = _begin(tmp_path, LATE, 3, {"in_loop": in_loop, "stays": (2, 7)}, checkpoint_every_steps=1)
    crew.begin(*told, **common)
    crew.reached(2, "stays")
    crew.reached(0, "committed step 5")
    crew.members[2].signal(signal.SIGKILL)
    survivors = [crew.outcome(number) for number in (0, 1)]
    assert {outcome.result.kind for outcome in survivors} == {"collective_failed"}
    assert _saved(tmp_path) == [5], "within a round nothing is saved"
    told_again = _run(crew, tmp_path, ranks=2, config={"in_loop": in_loop}, checkpoint=_newest(tmp_path))
    assert _distance(told_again, expected(2, 5)) < 2e-5
    assert [report.step for report in told_again[0].reports] == list(range(6, STEPS + 1))


def test_ranks_come_and_go(crew: Crew, tmp_path: Path) -> None:
    checkpoint = None
    for ranks, end_at in ((1, 5), (4, 10), (2, None)):
        ends = {} if end_at is None else {"end_at": end_at}
        told = _run(crew, tmp_path, ranks=ranks, checkpoint=checkpoint, **ends)
        checkpoint = _newest(tmp_path)
    assert _distance(told, expected(2, 5)) < 2e-5


def test_what_is_due_in_a_round_is_saved_after_it(crew: Crew, tmp_path: Path) -> None:
    _run(crew, tmp_path / "cadence", checkpoint_every_steps=3)
    assert _saved(tmp_path / "cadence") == [5, 10, 14]
    _run(crew, tmp_path / "asked", config={"asks": 6})
    assert _saved(tmp_path / "asked") == [10, 14]


def test_a_script_that_ends_within_a_round_loses_no_gradient(crew: Crew, tmp_path: Path) -> None:
    """It alone decides when: nobody knew that step 13 was the last."""
    config = {"leaves": 13, "top": {"gradient_clipping": CLIP}, "decays": False}
    told = _run(crew, tmp_path, config=config, batch=BatchSettings())
    assert _saved(tmp_path) == [13]
    known = _run(crew, tmp_path / "known", config={**config, "leaves": None}, batch=BatchSettings(max_steps=13))
    moved, still = (_state(url) for url in (tmp_path, tmp_path / "known"))
    assert len(told[0].reports) == len(known[0].reports) == 13
    assert moved.keys() == still.keys()
    assert all(torch.equal(moved[name], still[name]) for name in still)


@pytest.mark.parametrize("step", [7, 9], ids=["applied late", "one of many at the end of a round"])
def test_a_gradient_that_is_not_finite_is_not_applied(crew: Crew, tmp_path: Path, step: int) -> None:
    """Of step 7 it is found in step 9, of step 9 in step 10, which ends the round."""
    told = _run(crew, tmp_path, config={"bad": (1, step - 1)}, anomalies=AnomalySettings("skip"))
    for outcome in told:
        assert [report.step for report in outcome.reports if report.anomaly] == [min(step + 2, 10)]
    assert _distance(told, expected(2, 5, skipped=step)) < 2e-5


def test_a_rollback_leaves_out_the_samples_of_the_step_that_was_bad(crew: Crew, tmp_path: Path) -> None:
    told, common = _begin(tmp_path, LATE, 3, {"bad": (1, 6)}, anomalies=AnomalySettings("rollback"))
    outcomes = crew.run(*told, **common)
    assert {outcome.result.kind for outcome in outcomes} == {"anomaly"}
    bad = {outcome.result.bad_step.positions for outcome in outcomes}
    assert bad == {((6 * BATCH, 7 * BATCH),)}, "found in step 9, of step 7"


def test_it_comes_to_the_optimum(crew: Crew, tmp_path: Path) -> None:
    """Strongly convex, full batches: a delay of 4 steps costs little where the rate is small enough for it."""
    ridge = 0.05
    config = {"stage": 0, "lr": 0.3, "batch": 960, "micro": 480, "ridge": ridge}
    outcomes = crew.run(
        (0, 1), "convex.train", {**config, "url": str(tmp_path)}, batch=BatchSettings(max_steps=240), max_world_size=4,
        communication=CommunicationSettings("async", staleness=4, every_steps=60), nodes=(0, 1),
    )  # fmt: skip
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    least, begun = optimum(ridge), objective(torch.zeros(DIMENSIONS), ridge)
    left = (float(outcomes[0].told["objective"]) - least) / (begun - least)
    assert left < 1e-3, left

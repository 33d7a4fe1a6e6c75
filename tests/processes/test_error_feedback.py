"""Lossy strategies: what is sent and what is left make up the gradient, and what is left survives other world sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import strategy_ranks
import torch
from convex import DIMENSIONS, objective, optimum
from crew import Crew, Outcome
from lab.allreduce import on_ranks
from strategy_ranks import NUMEL, SHAPES, part_of
from test_oracle import BATCH, LAST_STEP, Run, _assert_ended, _assert_every_sample_once

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.policy.communication import LOSSY
from elastic.core.settings import AnomalySettings, CommunicationSettings

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_sent_and_what_is_left_make_up_the_gradient(ranks: int) -> None:
    found = on_ranks(ranks, strategy_ranks.compress)
    whole = 4 * NUMEL
    for name in found[0]:
        summed = [torch.tensor(outcome[name][0]) for outcome in found]
        sent = [torch.tensor(outcome[name][1]) for outcome in found]
        assert all(torch.equal(summed[0], other) for other in summed), "the same bits on every rank"
        total = torch.stack(sent).sum(dim=0)
        assert torch.allclose(summed[0], total, rtol=1e-4, atol=1e-5 * float(total.abs().max())), name
        wire = found[0][name][2]
        for rank in range(ranks):
            part, own = part_of(rank), sent[rank]
            left = (part - own).norm() / part.norm()
            match name:
                case "hierarchical":
                    assert torch.equal(part, own)
                case "int8":
                    assert float((part - own).abs().max()) <= float(part.abs().max()) / 127 / 2 * 1.001
                    assert wire <= (ranks - 1) * (NUMEL + 4 * math.ceil(NUMEL / 1024) + 1024)
                case "top_k":
                    kept = round(0.05 * NUMEL)
                    assert int((own != 0).sum()) == kept
                    assert float(own[own != 0].abs().min()) >= float((part - own).abs().max())
                    assert wire <= (ranks - 1) * 8 * kept
                case "power_sgd":
                    # A random matrix has no low rank: much is left, but never more than there was.
                    assert 0.1 < left < 1.0
                    assert wire <= whole / 2
                case _:
                    raise AssertionError(name)


def test_what_is_not_a_number_on_one_rank_is_none_on_all() -> None:
    found = on_ranks(2, strategy_ranks.compress, 1)
    for name in found[0]:
        for outcome in found:
            assert any(math.isnan(value) or math.isinf(value) for value in outcome[name][0]), name


def test_power_sgd_finds_a_matrix_of_its_rank() -> None:
    """The first step has a random basis, and the range of the matrix is found in it already."""
    for left in on_ranks(2, strategy_ranks.repeat_one_matrix):
        assert max(left) < 1e-5


def test_matrices_are_chosen_by_what_they_save() -> None:
    compressor = strategy_ranks.compressors()["power_sgd"]
    assert isinstance(compressor, strategy_ranks.PowerSgd)
    assert compressor.matrices() == {"weight": (40, 30), "kernel": (20, 9)}
    assert SHAPES.keys() - compressor.matrices().keys() == {"bias", "small"}


# -- whole generations -------------------------------------------------------------------------------------------------

GRANTED: dict[str, CommunicationSettings] = {
    name: CommunicationSettings("error_feedback", name, density=0.05, rank=2) for name in LOSSY
}


def _generations(
    crew: Crew, url: Path, config: dict[str, Any], settings: CommunicationSettings | None, worlds: Any, **more: Any
) -> list[list[Outcome]]:
    """`worlds`: (members, the node of each, the step at which the generation ends)."""
    generations: list[list[Outcome]] = []
    store = CheckpointStore(str(url), "run")
    for who, nodes, end_at in worlds:
        checkpoint = store.list()[0].id if generations else None
        spec = {"batch": BATCH, "fn": "train"} | more
        outcomes = crew.run(
            who, spec.pop("fn"), {**config, "url": str(url)}, end_at=end_at, max_world_size=4, checkpoint=checkpoint,
            communication=settings, nodes=nodes, **spec,
        )  # fmt: skip
        generations.append(outcomes)
        assert all(outcome.clean and not outcome.sockets for outcome in outcomes)
        assert {outcome.result.kind for outcome in outcomes} == {"finished" if end_at is None else "ended"}, outcomes[
            0
        ].result.traceback
    return generations


def _owed(store: CheckpointStore, step: int) -> dict[str, torch.Tensor]:
    """Of the checkpoint of a step: the sum of the residuals over the islands, by the parameter's name."""
    from test_oracle import state_of

    (found,) = [entry.id for entry in store.list() if entry.step == step]
    manifest = store.manifest(found)
    sums: dict[str, torch.Tensor] = {}
    for key, tensor in state_of(store, manifest).items():
        if key.startswith("kept/share/residual/"):
            name = key.split("/", 4)[4]
            sums[name] = sums.get(name, torch.zeros_like(tensor)) + tensor
    return sums


_CASES: list[tuple[str, dict[str, Any]]] = [
    ("int8", {"stage": 0}),
    ("top_k", {"stage": 1, "in_loop": True}),
    ("power_sgd", {"stage": 0}),
    ("power_sgd", {"stage": 1}),
    ("top_k", {"stage": 1, "dtype": "bf16"}),
    ("int8", {"stage": 1, "dtype": "bf16", "top": {"data_types": {"grad_accum_dtype": "fp32"}}}),
    ("auto", {"stage": 1}),
]


@pytest.mark.parametrize(("name", "config"), _CASES, ids=str)
def test_what_is_owed_goes_through_other_worlds(crew: Crew, tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    """Saved, resharded, verified and given out anew, in every data type."""
    config, store = {**config, "dropout": 0.1}, CheckpointStore(str(tmp_path), "run")
    settings = GRANTED.get(name, CommunicationSettings("error_feedback", check_every_steps=2))
    worlds = [
        ((0, 1, 2, 3), (0, 0, 1, 1), 3),
        ((2, 0, 3), (0, 1, 2), 4),
        ((1, 3, 0, 2), (0, 1, 0, 1), 6),
        ((3, 2), (0, 1), None),
    ]
    generations = _generations(crew, tmp_path, config, settings, worlds)
    _assert_ended(generations[-1], "finished", LAST_STEP)
    owed = _owed(store, LAST_STEP)
    assert set(owed) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    if name != "auto":
        assert float(owed["first.weight"].norm()) > 1e-4
    _assert_every_sample_once([outcome for outcomes in generations for outcome in outcomes])
    told = Run(tmp_path, generations)
    assert all(math.isfinite(float(loss)) for loss in told.losses.values())


@pytest.mark.parametrize("name", GRANTED)
def test_the_sum_of_what_is_owed_is_the_same_after_a_restore(crew: Crew, tmp_path: Path, name: str) -> None:
    config, store = {"stage": 1}, CheckpointStore(str(tmp_path), "run")
    _generations(crew, tmp_path, config, GRANTED[name], [((0, 1, 2, 3), (0, 0, 1, 1), 3)])
    before = _owed(store, 3)
    checkpoint = store.list()[0].id
    for who, nodes in (((0, 2, 1), (0, 1, 2)), ((3, 1), (0, 1))):
        outcomes = crew.run(
            who, "tells_what_is_owed", {**config, "url": str(tmp_path)}, batch=BATCH, max_world_size=4,
            checkpoint=checkpoint, communication=GRANTED[name], nodes=nodes,
        )  # fmt: skip
        _assert_ended(outcomes, "finished", LAST_STEP)
        for parameter, total in before.items():
            parts = [outcome.told["owed"][parameter] for outcome in outcomes if parameter in outcome.told["owed"]]
            assert len(parts) == len(set(nodes))
            again = torch.stack([torch.tensor(part, dtype=torch.float64) for part in parts]).sum(dim=0)
            assert torch.allclose(again, total, rtol=1e-6, atol=1e-9), parameter


def test_a_step_that_is_skipped_leaves_what_is_owed_as_it_was(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "bad": 5, "how": "nan", "tell": True}
    outcomes = crew.run(
        (0, 1), "train_on_a_bad_sample", {**config, "url": str(tmp_path)}, batch=BATCH, max_world_size=4,
        communication=GRANTED["top_k"], nodes=(0, 1), anomalies=AnomalySettings("skip"),
    )  # fmt: skip
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    assert outcomes[0].told["skipped_steps"] > 0
    owed = _owed(CheckpointStore(str(tmp_path), "run"), LAST_STEP)
    assert all(bool(tensor.isfinite().all()) for tensor in owed.values())
    assert all(report.anomaly or math.isfinite(report.loss) for outcome in outcomes for report in outcome.reports)


def test_what_is_owed_is_not_dropped_by_a_run_without_error_feedback(crew: Crew, tmp_path: Path) -> None:
    _generations(crew, tmp_path, {"stage": 1}, GRANTED["int8"], [((0, 1), (0, 1), 3)])
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
    for settings in (None, CommunicationSettings()):
        outcomes = crew.run(
            (0, 1), "train", {"stage": 1, "url": str(tmp_path)}, batch=BATCH, max_world_size=4, checkpoint=checkpoint,
            communication=settings, nodes=(0, 1),
        )  # fmt: skip
        for outcome in outcomes:
            assert outcome.result.kind == "usage_error", outcome.result
            assert "resume the run with communication: {semantics: error_feedback}" in outcome.result.message


# -- what error feedback promises, on a convex problem -----------------------------------------------------------------

_STEPS, _RESIZES = 117, 12
_CONVEX = {"stage": 0, "lr": 0.1, "batch": 48, "micro": 4}
_TOP_K = CommunicationSettings("error_feedback", "top_k", density=0.05)


def _convex(
    crew: Crew, url: Path, config: dict[str, Any], settings: CommunicationSettings | None, worlds: Any, steps: int
) -> float:
    fn = "convex.train_and_forget" if "forgets" in config else "convex.train"
    generations = _generations(crew, url, config, settings, worlds, fn=fn, batch=BatchSettings(max_steps=steps))
    return float(generations[-1][0].told["objective"])


@pytest.mark.slow
def test_twelve_resizes_end_where_no_resize_ends(crew: Crew, tmp_path: Path) -> None:
    """And what would be lost, were the residuals dropped at each, is seen by the same measure."""
    sizes, every = (4, 3, 2), _STEPS // (_RESIZES + 1)
    worlds = [
        (tuple(range(size)), tuple(range(size)), every * (number + 1) if number < _RESIZES else None)
        for number, size in enumerate(sizes[number % 3] for number in range(_RESIZES + 1))
    ]
    still = _convex(crew, tmp_path / "still", _CONVEX, _TOP_K, [(range(4), range(4), None)], _STEPS)
    kept = _convex(crew, tmp_path / "kept", _CONVEX, _TOP_K, worlds, _STEPS)
    dropped = _convex(crew, tmp_path / "dropped", {**_CONVEX, "forgets": "install"}, _TOP_K, worlds, _STEPS)
    assert kept == pytest.approx(still, rel=1e-3), (still, kept, dropped)
    assert dropped > 1.02 * still, (still, kept, dropped)


@pytest.mark.slow
def test_each_strategy_comes_to_the_optimum(crew: Crew, tmp_path: Path) -> None:
    """Full batches, a strongly convex objective. Without feedback the compressor that sends the least does not come."""
    ridge, steps, nodes = 0.05, 150, (0, 1)
    config = {"stage": 0, "lr": 0.3, "batch": 960, "micro": 480, "ridge": ridge}
    least, begun = optimum(ridge), objective(torch.zeros(DIMENSIONS), ridge)
    granted = {name: replace(settings, density=0.2) for name, settings in GRANTED.items()}

    def left(name: str, config: dict[str, Any], settings: CommunicationSettings) -> float:
        found = _convex(crew, tmp_path / name, config, settings, [((0, 1), nodes, None)], steps)
        return (found - least) / (begun - least)

    for name, settings in {"ring": CommunicationSettings(strategy="ring"), **granted}.items():
        assert left(name, config, settings) < 1e-3, name
    assert left("forgets", {**config, "forgets": "_keep"}, granted["top_k"]) > 2e-2

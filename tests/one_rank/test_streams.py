"""A stream under a real engine, one rank: generations that follow each other read and train as one that goes through,
also through epochs whose readers are of unequal length; and a repeated step that reads something else ends the run
before it is trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.alone import MemoryNode, live
from elastic.checkpoint.storage import CheckpointStore
from elastic.comm.rendezvous import host_store
from elastic.core.data.readers import READERS
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.training.local import run_local

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

STEPS = 12


def documents(reader: int, readers: int) -> Iterator[list[int]]:
    """Seven documents for each reader, over and over."""
    return ([reader, *range(number)] for number in range(7))


def uneven_documents(reader: int, readers: int) -> Iterator[list[int]]:
    """None for the third reader; every document has a sample of its own length."""
    return ([reader, number, 1, 1, 1] for number in range((5, 9, 0, 2, 6)[reader]))


def random_documents(reader: int, readers: int) -> Iterator[list[int]]:
    return ([reader, random.randrange(30), random.randrange(30)] for _ in range(7))


def train(config: dict[str, Any]) -> None:
    import elastic

    model = nn.Sequential(nn.Embedding(32, 8), nn.Dropout(0.1), nn.Linear(8, 32))
    source = random_documents if config.get("random") else documents
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        training_data=elastic.data.stream(source, shuffle_window=3, pack=elastic.data.Pack(6, eos=31)),
        num_workers=config["num_workers"],
        config={
            "train_batch_size": 9,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    for batch in loader:
        logits = engine(batch[:, :-1].to(engine.device)).flatten(0, 1)
        engine.backward(nn.functional.cross_entropy(logits, batch[:, 1:].to(engine.device).flatten()))
        engine.step()


def run(spec: GenerationSpec, folder: Path, end_at: int | None = None, **config: Any) -> tuple[Any, list[Any]]:
    result, coordinator = run_local(
        train, {"num_workers": 2, **config}, spec, host_store("127.0.0.1"), str(folder), end_at
    )
    return result, coordinator.reports


SPEC = GenerationSpec("streams", 1, 0, 1, batch=BatchSettings(max_steps=STEPS), checkpoint_every_steps=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    result, reports = run(SPEC, tmp_path_factory.mktemp("whole"))
    assert result.kind == "finished", result.traceback
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    assert len({report.content for report in reports}) == STEPS
    assert all(report.tokens == 9 * 6 for report in reports)
    return reports


def told(reports: list[Any]) -> list[tuple[int, float, int]]:
    return [(report.step, report.loss, report.content) for report in reports]


def test_generations_from_storage_go_on_where_the_one_before_ended(whole: list[Any], tmp_path: Path) -> None:
    _, first = run(SPEC, tmp_path, end_at=5, num_workers=1)
    store = CheckpointStore(str(tmp_path), "streams")
    saved = store.manifest(store.list()[0].id)
    assert sorted(saved.extra_state[READERS]["states"]) == ["0", "1", "2", "3", "4"]
    result, second = run(replace(SPEC, generation=2, checkpoint=saved.id), tmp_path, num_workers=3)
    assert result.kind == "finished", result.traceback
    assert told([*first, *second]) == told(whole)


def test_generations_from_memory_go_on_where_the_one_before_ended(whole: list[Any], tmp_path: Path) -> None:
    reports = []
    with MemoryNode() as node:
        for number, last in enumerate((4, 7, STEPS), 1):
            config = {"num_workers": number - 1}
            reports += live(number, train, config, tmp_path, end_at=last, node=node, restore=number > 1).steps
    assert told(reports) == told(whole)


def test_a_repeated_step_that_reads_something_else_is_not_trained_on(whole: list[Any], tmp_path: Path) -> None:
    run(SPEC, tmp_path, end_at=4)
    (checkpoint,) = CheckpointStore(str(tmp_path), "streams").list()
    again = replace(SPEC, generation=2, checkpoint=checkpoint.id)
    known = {9 * (report.step - 1): report.content for report in whole[4:7]}
    result, reports = run(replace(again, content=known), tmp_path)
    assert (result.kind, len(reports)) == ("finished", STEPS - 4)
    result, reports = run(replace(again, generation=3, content=known), tmp_path, random=True)
    assert (result.kind, reports) == ("usage_error", [])
    assert "reads other documents than before" in result.message or "step 5 is repeated" in result.message
    wrong = {**known, 54: known[54] + 1}
    result, reports = run(replace(again, generation=4, content=wrong), tmp_path)
    assert (result.kind, len(reports)) == ("usage_error", 2)
    assert "step 7 is repeated and has read other samples than before" in result.message


# -- epochs -----------------------------------------------------------------------------------------------------------


def train_epochs(config: dict[str, Any]) -> None:
    import elastic

    model = nn.Sequential(nn.Embedding(32, 8), nn.Dropout(0.1), nn.Linear(8, 32))
    stages = {"shuffle_window": 3, "pack": elastic.data.Pack(4, eos=31)} if config["packed"] else {}
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        training_data=elastic.data.stream(
            uneven_documents, transform=None if config["packed"] else torch.tensor, repeat=config["repeat"], **stages
        ),
        num_workers=config["num_workers"],
        config={
            "train_batch_size": 9,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    for epoch in elastic.epochs(config["count"]):
        assert loader.epoch == epoch
        for batch in loader:
            logits = engine(batch[:, :-1].to(engine.device)).flatten(0, 1)
            engine.backward(nn.functional.cross_entropy(logits, batch[:, 1:].to(engine.device).flatten()))
            engine.step()
            # Between two steps, `epoch` is that of the next one.
            elastic.report(epoch=epoch, left=len(elastic.state.setdefault("seen", [])))
        elastic.state["seen"] = [*elastic.state.get("seen", ()), epoch]


def run_epochs(spec: GenerationSpec, folder: Path, end_at: int | None = None, **config: Any) -> tuple[Any, list[Any]]:
    config = {"num_workers": 0, "packed": True, "repeat": True, "count": None, **config}
    result, coordinator = run_local(train_epochs, config, spec, host_store("127.0.0.1"), str(folder), end_at)
    return result, coordinator.reports


EPOCHS = replace(SPEC, batch=BatchSettings(epochs=3), checkpoint_every_steps=2)


@pytest.mark.parametrize("packed", [False, True])
def test_a_run_of_epochs_ends_with_its_last_reader_and_goes_on_from_any_step(packed: bool, tmp_path: Path) -> None:
    result, whole = run_epochs(EPOCHS, tmp_path / "whole", packed=packed)
    assert result.kind == "finished", result.traceback
    last = len(whole)
    if not packed:
        # The last reader's micro-batches are of one sample, the others' of two.
        assert [report.samples for report in whole] == 3 * [7, 5, 4, 3, 2, 1]
    assert [report.positions for report in whole] == [
        ((sum(r.samples for r in whole[:step]), sum(r.samples for r in whole[: step + 1])),) for step in range(last)
    ]
    assert [report.metrics["epoch"] for report in whole] == sorted(report.metrics["epoch"] for report in whole)
    for end in range(1, last):
        folder = tmp_path / str(end)
        result, first = run_epochs(EPOCHS, folder, packed=packed, end_at=end)
        assert (result.kind, len(first)) == ("ended", end)
        newest = max(CheckpointStore(str(folder), "streams").list(), key=lambda found: found.step)
        spec = replace(EPOCHS, generation=2, checkpoint=newest.id)
        result, second = run_epochs(spec, folder, packed=packed, num_workers=end % 2 * 2)
        assert result.kind == "finished", result.traceback
        assert told([*first, *second]) == told(whole)


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_that_does_not_repeat_is_read_as_often_as_the_loop_asks(count: int, tmp_path: Path) -> None:
    endless = replace(EPOCHS, batch=BatchSettings())
    result, reports = run_epochs(endless, tmp_path, packed=False, repeat=False, count=count)
    assert result.kind == "finished", result.traceback
    assert sum(report.samples for report in reports) == count * 22


def test_max_steps_end_a_run_of_epochs_too(tmp_path: Path) -> None:
    bounded = replace(EPOCHS, batch=BatchSettings(max_steps=3))
    result, reports = run_epochs(bounded, tmp_path, packed=False, repeat=False)
    assert (result.kind, len(reports)) == ("finished", 3), result.traceback


def test_epochs_of_a_stream_without_epochs_are_refused(tmp_path: Path) -> None:
    result, reports = run_epochs(replace(EPOCHS, batch=BatchSettings()), tmp_path, count=2)
    assert (result.kind, reports) == ("usage_error", [])
    assert "elastic.epochs(2): this stream has no epochs" in result.message

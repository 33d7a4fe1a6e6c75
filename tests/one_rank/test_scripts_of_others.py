"""Scripts in the forms of public tutorials, unchanged: as DeepSpeed runs them, inside of a run, and with two changes of
the generation. What they end with is the same."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts_of_others import SCRIPTS, gpt_by_hand
from torch.utils.data import DataLoader

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.comm.rendezvous import host_store
from elastic.core.errors import CollectiveFailed, UsageError
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.core.settings import AnomalySettings
from elastic.engines.deepspeed import user_calls
from elastic.training.in_loop.function_call import FunctionCall
from elastic.training.local import LocalCoordinator, run_local
from elastic.training.loop import GenerationRunner
from elastic.training.user import startup
from elastic.training.watch.once import warn_once

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6


def spec(checkpoint: str | None = None, number: int = 1, seed: int = 0) -> GenerationSpec:
    batch = BatchSettings(max_steps=STEPS)
    return GenerationSpec(
        "script", number, 0, 1, batch=batch, checkpoint=checkpoint, seed=seed, anomalies=AnomalySettings()
    )


def by_deepspeed(script: Any, stage: int, folder: Path) -> Any:
    """Within a generation for its process group and its seed alone: DeepSpeed's own engine and loader."""
    noted: list[Any] = []

    def train() -> None:
        with user_calls.building():
            script(noted.append, lambda loader: loader, stage, folder, STEPS)

    result, _ = run_local(train, None, spec(), host_store("127.0.0.1"), str(folder))
    assert result.kind == "finished", result.traceback
    return noted[-1]


def elastically(script: Any, stage: int, folder: Path, *ends: int) -> Any:
    """In generations, all but the last of which end after a given step."""
    noted: list[Any] = []

    def train() -> None:
        import elastic

        script(noted.append, elastic.prepare_data_loader, stage, folder, STEPS)

    for number, end_at in enumerate((*ends, None), start=1):
        saved = CheckpointStore(str(folder), "script").list()
        given = spec(saved[0].id if saved else None, number)
        result, _ = run_local(train, None, given, host_store("127.0.0.1"), str(folder), end_at)
        assert result.kind == ("ended" if end_at else "finished"), result.traceback
    assert result.step == STEPS
    return noted[-1]


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], rel: float = 1e-4) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=rel, abs=1e-5), name


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_it_ends_as_with_deepspeed(script: Any, stage: int, tmp_path: Path) -> None:
    still = elastically(script, stage, tmp_path / "still")
    moved = elastically(script, stage, tmp_path / "moved", 2, 4)
    assert_equal(moved, still, rel=1e-6)
    if script is not gpt_by_hand:
        # Its dropout draws from the platform's stream.
        assert_equal(still, by_deepspeed(script, stage, tmp_path / "plain"))


def called(train: Any, folder: Path) -> Any:
    """As a worker calls a training function, in one generation."""
    given, rendezvous = spec(), host_store("127.0.0.1")
    coordinator = LocalCoordinator(given, rendezvous, str(folder))
    runner = GenerationRunner(given, coordinator, rendezvous, lambda result: coordinator.close(wait=False))
    _, result = FunctionCall(train, None, next_runner=lambda runner, result: runner).run(runner)
    return result


def built(stage: int = 0) -> tuple[Any, Any]:
    import elastic

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=optimizer,
        training_data=[torch.ones(4)] * 12,
        config={"train_batch_size": 6, "zero_optimization": {"stage": stage}},
    )
    return engine, loader


def own_group() -> None:
    torch.distributed.init_process_group("gloo")


def own_command_line() -> None:
    argparse.ArgumentParser().parse_args(["--node-ip-address=10.0.0.1"])


def own_required_option() -> None:
    """DeepSpeed-Chat's. Seen: the same advice, which had been followed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.parse_args([], argparse.Namespace(model="opt"))


def own_optimizer() -> None:
    """Seen: it ended with "one iteration over the loader is one epoch", of a loader that there was not."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()


def own_backward() -> None:
    engine, loader = built(stage=1)
    for x in loader:
        engine(x).mean().backward()
        engine.step()


def own_step() -> None:
    """Ray Train's own DeepSpeed example."""
    engine, loader = built()
    for x in loader:
        engine.backward(engine(x).mean())
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def counts_by_a_list() -> None:
    """torch's language_translation."""
    engine, loader = built()
    for x in loader:
        engine.backward(engine(x).mean())
        engine.step()
        if engine.global_steps == 1:
            assert len(list(loader)) == 2


def next_of_an_earlier_epoch() -> None:
    raise StopIteration


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (own_group, "torch.distributed.init_process_group: the process group is formed"),
        (own_command_line, "take options from the function's argument"),
        (own_required_option, "remove required=True"),
        (own_optimizer, "has returned without elastic.initialize"),
        (own_backward, r"engine.step() came without engine.backward(loss) (no loss.backward())"),
        (own_step, "call engine.step() after every engine.backward(loss)"),
        (counts_by_a_list, "len(loader) counts them, and another DataLoader shows them"),
        (next_of_an_earlier_epoch, "batch for _ in elastic.epochs()"),
    ],
)
def test_what_is_written_for_another_launcher_says_what_to_write(train: Any, sentence: str, tmp_path: Path) -> None:
    result = called(train, tmp_path)
    assert (result.kind, sentence in result.message) == ("usage_error", True), result


def test_a_batch_by_the_number_of_workers_is_named_where_it_changes(tmp_path: Path) -> None:
    """DeepSpeed-Chat's. Seen: "set global_batch back, or start a new run", after the first loss of a node."""
    workers = 2

    def train() -> None:
        import elastic

        model = torch.nn.Linear(4, 1)
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            training_data=[torch.ones(4)] * 12,
            config={"train_micro_batch_size_per_gpu": 3, "train_batch_size": 3 * workers},
        )
        for x in loader:
            engine.backward(engine(x).mean())
            engine.step()

    run_local(train, None, spec(), host_store("127.0.0.1"), str(tmp_path), 1)
    newest, workers = CheckpointStore(str(tmp_path), "script").list()[0].id, 1
    result, _ = run_local(train, None, spec(newest, 2), host_store("127.0.0.1"), str(tmp_path))
    assert result.kind == "usage_error", result.traceback
    assert "began with train_batch_size 6, and has 3 with 1 workers" in result.message
    assert "leave it out (train_micro_batch_size_per_gpu is taken times max_workers)" in result.message


@pytest.mark.parametrize("of", ["the engine", "the script"])
@pytest.mark.parametrize("horizon", [24, 30])
def test_a_schedule_by_the_number_of_workers(
    of: str, horizon: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed-Chat's is of `epochs * len(train_dataloader)` steps, with a DistributedSampler. Seen: after a loss
    its cosine went on as one of a longer run, without a word."""
    steps = 24
    schedulers: list[Any] = []

    def train() -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, end=steps: 1.0 - step / end)
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=optimizer,
            training_data=[torch.ones(4)] * 12,
            lr_scheduler=scheduler if of == "the engine" else None,
            config={"train_batch_size": 6},
        )
        schedulers.append(scheduler)
        for _ in elastic.epochs():
            for x in loader:
                engine.backward(engine(x).mean())
                engine.step()
                if of == "the script":
                    scheduler.step()

    run_local(train, None, spec(), host_store("127.0.0.1"), str(tmp_path), 3)
    newest, steps = CheckpointStore(str(tmp_path), "script").list()[0].id, horizon
    result, _ = run_local(train, None, spec(newest, 2), host_store("127.0.0.1"), str(tmp_path))
    assert result.kind == "finished", result.traceback
    said = [text for text in caplog.messages if "gives learning rate 0.09 after 3 steps, and gave 0.0875" in text]
    assert len(said) == (horizon == 30)
    startup.same_schedules({"scheduler": schedulers[1]}, resumed=False)
    schedulers[1].lr_lambdas = [lambda step: 0.0]
    with pytest.raises(UsageError, match="follows the number of workers"):
        startup.same_schedules({"scheduler": schedulers[1]}, resumed=False)


class InfiniteIterator:
    """HelloDeepSpeed's; DeepSpeed's RepeatingLoader is alike."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable
        self._iterator = iter(iterable)

    def __iter__(self) -> InfiniteIterator:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._iterable)
            return next(self._iterator)


def over_epochs(loader: Any) -> Any:
    for _ in elastic.epochs():
        yield from loader


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("made", [InfiniteIterator, over_epochs])
def test_an_iterator_that_is_made_before_the_engine(made: Any, bounded: bool, tmp_path: Path) -> None:
    """Seen: refused; and called again in the third epoch, with two empty ones before, such a function returned, which
    ended the run as finished, for all workers where the job has no `max_steps`."""

    def train() -> None:
        model = torch.nn.Linear(4, 1)
        batches = made(elastic.prepare_data_loader(DataLoader([torch.ones(4)] * 12, batch_size=3)))
        engine, *_ = elastic.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            config={"train_batch_size": 6},
        )
        for x in batches:
            if engine.global_steps == STEPS + 1:
                # With a batch at hand. Seen: "the loader was asked for the next batch before engine.step()".
                break
            engine.backward(engine(x).mean())
            engine.step()

    results = []
    for end_at in (1, 5, None):
        saved = CheckpointStore(str(tmp_path), "script").list()
        given = spec(saved[0].id if saved else None, len(results) + 1)
        given = replace(given, batch=BatchSettings(max_steps=STEPS if bounded else None))
        results.append(run_local(train, None, given, host_store("127.0.0.1"), str(tmp_path), end_at)[0])
    assert [result.kind for result in results[:2]] == ["ended", "ended"], results[1]
    if made is InfiniteIterator:
        assert results[2].kind == "usage_error", results[2]
        assert "without a batch. A function that is called again in a later epoch" in results[2].message
    else:
        assert (results[2].kind, results[2].step) == ("finished", STEPS + (not bounded)), results[2]


@pytest.mark.parametrize(("code", "kind"), [(None, "finished"), (0, "finished"), (3, "user_error")])
def test_a_script_that_ends_with_sys_exit(code: int | None, kind: str, tmp_path: Path) -> None:
    """Seen: `sys.exit(main())` after the last step was "user code failed"."""

    def train() -> None:
        engine, loader = built()
        for _ in range(3):
            for x in loader:
                engine.backward(engine(x).mean())
                engine.step()
        sys.exit(code)

    assert called(train, tmp_path).kind == kind


def test_a_script_that_destroys_the_process_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch's examples and accelerate's `end_training` end with it. Seen: the last step was not saved, and the run was
    "user code failed", with torch's "Default process group has not been initialized"."""
    warn_once.cache_clear()

    def train() -> None:
        engine, loader = built(stage=1)
        for _ in range(3):
            for x in loader:
                engine.backward(engine(x).mean())
                engine.step()
        group = torch.distributed.new_group([0])
        torch.distributed.destroy_process_group(group)
        torch.distributed.destroy_process_group()

    result = called(train, tmp_path)
    assert (result.kind, result.step) == ("finished", STEPS), result.traceback
    assert [text for text in caplog.messages if "destroy_process_group: nothing is done" in text]
    assert not torch.distributed.is_initialized()


def test_an_endless_loop_is_left_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What stands after it does not run. Seen: without any word."""
    after: list[bool] = []

    def train() -> None:
        engine, loader = built()
        while True:
            for x in loader:
                engine.backward(engine(x).mean())
                engine.step()
            if engine.global_steps > STEPS:
                break
        after.append(True)

    assert called(train, tmp_path).kind == "finished"
    assert after == []
    assert [record.message for record in caplog.records if "what stands after its loop does not run" in record.message]


@pytest.mark.parametrize("by_epochs", [False, True])
def test_a_report_after_the_last_step_is_named(
    by_epochs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: it was dropped without a word."""
    import elastic

    def train() -> None:
        engine, loader = built()
        for _ in elastic.epochs() if by_epochs else range(3):
            for x in loader:
                engine.backward(engine(x).mean())
                engine.step()
            elastic.report(accuracy=0.5)

    assert called(train, tmp_path).kind == "finished"
    told = [
        text
        for text in caplog.messages
        if f"elastic.report(accuracy=...) came after the report of step {STEPS}" in text
    ]
    assert len(told) == (0 if by_epochs else 1)


def test_client_state_of_an_earlier_step_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed's is that of the step that is loaded. The platform restores newer ones."""

    def train() -> None:
        engine, loader = built()
        engine.load_checkpoint("anywhere")
        for _ in range(3):
            for x in loader:
                engine.backward(engine(x).mean())
                engine.step()
                if engine.global_steps == 2:
                    engine.save_checkpoint("anywhere", client_state={"step": 2})

    run_local(train, None, spec(), host_store("127.0.0.1"), str(tmp_path), 3)
    newest = CheckpointStore(str(tmp_path), "script").list()[0]
    run_local(train, None, spec(newest.id, 2), host_store("127.0.0.1"), str(tmp_path))
    assert [record.message for record in caplog.records if "after step 2, and step 3 is restored" in record.message]


def in_its_loop(train: Any, folder: Path, resumes_at: int) -> tuple[list[GenerationRunner], Any]:
    """The first generation is to fail in its loop; the second continues after step `resumes_at`, once it is saved."""
    runners: list[GenerationRunner] = []

    def runner(checkpoint: str | None = None) -> GenerationRunner:
        given = GenerationSpec(
            "back", len(runners) + 1, 0, 1, batch=BatchSettings(max_steps=8), checkpoint=checkpoint,
            checkpoint_every_steps=1,
        )  # fmt: skip
        rendezvous = host_store("127.0.0.1")
        coordinator = LocalCoordinator(given, rendezvous, str(folder))
        runners.append(GenerationRunner(given, coordinator, rendezvous, lambda _: coordinator.close(wait=True)))
        return runners[-1]

    def following(_: GenerationRunner, result: Any) -> GenerationRunner:
        return runner({entry.step: entry.id for entry in CheckpointStore(str(folder), "back").list()}[resumes_at])

    first = runner()
    return runners, lambda: FunctionCall(train, None, following).run(first)[1]


def saved(runner: GenerationRunner) -> None:
    """Waits until the checkpoint of the last step is whole: the next one would take its place in a busy writer."""
    scope: Any = runner.generation.scope
    steps: Any = runner.generation.steps
    # The writer has it only once it is copied.
    steps._saving().drain()
    scope.coordinator._writer.flush()


def lose_a_peer(runner: GenerationRunner) -> None:
    scope: Any = runner.generation.scope
    scope.fail(CollectiveFailed("a peer was lost"))


def test_a_step_back_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Seen: the loop of the later epoch went on with the last steps of the earlier one, whose own end never came: a
    scheduler that is stepped there was one step behind from then on."""
    rates: dict[int, list[float]] = {}
    calls: list[int] = []

    def train() -> None:
        import elastic

        calls.append(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        elastic.state.register(scheduler=scheduler)
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=[torch.ones(4)] * 12, config={"train_batch_size": 6}
        )
        for _ in range(4):
            for x in loader:
                step = elastic.get_context().step
                saved(runners[-1])
                if step == 4 and len(runners) == 1:
                    # Early in the third epoch; the newest state is of the second.
                    lose_a_peer(runners[-1])
                rates.setdefault(step, []).append(optimizer.param_groups[0]["lr"])
                engine.backward(engine(x).mean())
                engine.step()
            scheduler.step()

    runners, run = in_its_loop(train, tmp_path, resumes_at=3)
    result = run()
    assert (result.kind, result.step, len(calls)) == ("finished", 8, 2), result.traceback
    assert {step: tried[-1] for step, tried in rates.items()} == {step: 0.5 ** (step // 2) for step in range(8)}


@pytest.mark.parametrize("own", [True, False])
def test_a_rate_by_a_counter_of_its_own_leaves_the_loop(
    own: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: after a repeated step such a loop trained on with the rates of later steps."""

    def train() -> None:
        import elastic

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=[torch.ones(4)] * 48, config={"train_batch_size": 6}
        )
        for counter, x in enumerate(loader):
            saved(runners[-1])
            if counter == 6:
                lose_a_peer(runners[0])
            optimizer.param_groups[0]["lr"] = 1.0 / (1 + (counter if own else elastic.get_context().step))
            engine.backward(engine(x).mean())
            engine.step()

    runners, run = in_its_loop(train, tmp_path, resumes_at=5)
    result = run()
    assert (result.kind, result.step) == (("collective_failed", 5) if own else ("finished", 8)), result.traceback
    said = [record.message for record in caplog.records if "called again: it sets learning rates" in record.message]
    assert len(said) == own


@pytest.mark.parametrize("late", [False, True])
def test_a_rate_that_is_set_where_a_step_begins(late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The step is lost at its second micro-batch and begun again: there the loop sets nothing. Seen: it was made with
    the restored rate, that of the step before. `late`: set before the update, it is right, and the loop stays."""
    rates: list[float] = []

    def train() -> None:
        import elastic

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=optimizer,
            training_data=[torch.ones(4)] * 48,
            config={"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2},
        )
        begins = True
        for x in loader:
            step, last = elastic.get_context().step, engine.is_gradient_accumulation_boundary()
            if begins if not late else last:
                optimizer.param_groups[0]["lr"] = 1.0 / (1 + step)
            if begins:
                saved(runners[-1])
            elif step == 5 and len(runners) == 1:
                lose_a_peer(runners[0])
            engine.backward(engine(x).mean())
            engine.step()
            if begins := last:
                rates.append(optimizer.param_groups[0]["lr"])

    runners, run = in_its_loop(train, tmp_path, resumes_at=5)
    result = run()
    assert (result.kind, result.step) == (("finished", 8) if late else ("collective_failed", 5)), result.traceback
    said = [record.message for record in caplog.records if "called again: it sets learning rates" in record.message]
    assert len(said) == (not late)
    assert rates == pytest.approx([1.0 / (1 + step) for step in range(len(rates))])

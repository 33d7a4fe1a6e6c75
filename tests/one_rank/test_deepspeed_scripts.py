"""Scripts written for DeepSpeed: their own DataLoader, save_checkpoint, load_checkpoint, no_sync, save_16bit_model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from elastic.checkpoint.storage import CheckpointStore
from elastic.comm.rendezvous import host_store
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.core.settings import AnomalySettings
from elastic.engines.deepspeed import monitors, user_calls
from elastic.training.local import run_local
from elastic.training.watch.once import warn_once

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)), index


def settings(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {"train_batch_size": 6, "zero_optimization": {"stage": stage}, **more}


def run(train: Any, url: Path, checkpoint: str | None = None, steps: int = 4, end_at: int | None = None) -> Any:
    """One generation of one rank; the second, when `checkpoint` is given."""
    number = 1 if checkpoint is None else 2
    spec = GenerationSpec("script", number, 0, 1, batch=BatchSettings(max_steps=steps), checkpoint=checkpoint)
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(url), end_at)
    assert result.kind == ("ended" if end_at else "finished"), result.traceback
    return result


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def every_batch(loader: Any) -> Iterator[Any]:
    import elastic

    for _ in elastic.epochs():
        yield from loader


def one_pass(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).mean())
    engine.step()


@pytest.mark.parametrize("way", ["training_data", "prepared"])
@pytest.mark.parametrize("sampler", [None, "distributed"])
def test_a_scripts_own_data_loader(way: str, sampler: str | None, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    started: list[int] = []

    def train() -> None:
        import elastic

        data = Numbers()
        of_ranks = DistributedSampler(data, 2, 1, shuffle=False) if sampler else None
        loader: Any = DataLoader(data, batch_size=2, sampler=of_ranks, worker_init_fn=started.append)
        model, optimizer = model_and_optimizer()
        config = settings()
        if way == "prepared":
            loader = elastic.prepare_data_loader(loader)
            # DeepSpeed's own order of arguments.
            engine, *_ = elastic.initialize(None, model, optimizer, config=config)
        else:
            engine, _, loader, _ = elastic.initialize(
                None, model, optimizer, None, loader, None, 29500, None, None, None, config
            )
        assert engine.train_batch_size() == 6
        for _ in range(1):
            if sampler:
                loader.sampler.set_epoch(0)
            for x, index in loader:
                seen.append(index.tolist())
                one_pass(engine, x)
        assert len(loader.dataset) == 12

    run(train, tmp_path, steps=2)
    # In the dataset's own order, all samples on one rank, in micro-batches of the DataLoader's size.
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_a_batch_size_that_contradicts_the_configuration_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        loader = DataLoader(Numbers(), batch_size=2)
        config = settings(train_micro_batch_size_per_gpu=3)
        elastic.initialize(model=model, optimizer=optimizer, training_data=loader, config=config)

    spec = GenerationSpec("script", 1, 0, 1)
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path))
    assert result.kind == "usage_error"
    assert "the DataLoader's batch_size is 2, but train_micro_batch_size_per_gpu is 3" in result.message


def test_save_and_load_checkpoint_are_the_platforms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: both ended the run with an exception."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    found: list[Any] = []

    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=DataLoader(Numbers(), batch_size=3), config=settings()
        )
        found.append(engine.load_checkpoint("anywhere"))
        assert engine.save_checkpoint("anywhere")
        for number, (x, _) in enumerate(every_batch(loader)):
            one_pass(engine, x)
            if number == 1:
                # After step 1, between two steps.
                engine.save_checkpoint("anywhere", "tag", {"epoch": 1})
            if number == 4:
                # In the middle of step 3: saved when it is finished.
                engine.save_checkpoint("anywhere", client_state={"epoch": 3})

    run(train, tmp_path, end_at=3)
    store = CheckpointStore(str(tmp_path), "script")
    assert [entry.step for entry in store.list()] == [3, 1]
    run(train, tmp_path, checkpoint=store.list()[1].id, steps=2)
    assert found == [(None, None), (store.list()[-1].id, {"epoch": 1})]
    warned = [record.message for record in caplog.records if "engine." in record.message]
    assert [text.partition(":")[0] for text in warned] == ["engine.load_checkpoint", "engine.save_checkpoint"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_save_16bit_model(stage: int, tmp_path: Path) -> None:
    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        config = settings(stage, bf16={"enabled": True})
        if stage == 3:
            config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=DataLoader(Numbers(), batch_size=3), config=config
        )
        for x, _ in loader:
            one_pass(engine, x.bfloat16())
        assert engine.save_16bit_model(str(tmp_path / "out"), "model.bin")

    run(train, tmp_path, steps=1)
    weights = torch.load(tmp_path / "out" / "model.bin", weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {"weight": (1, 4), "bias": (1,)}
    assert weights["weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("micro", [6, 2])
def test_the_boundary_is_what_deepspeed_answers_at_each_of_four_places(micro: int, tmp_path: Path) -> None:
    """Seen: before the forward it answered for the micro-batch before; gradients were never reduced under no_sync."""
    ours: list[bool] = []
    theirs: list[bool] = []

    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        loader = DataLoader(Numbers(), batch_size=micro)
        engine, _, batches, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=loader, config=settings()
        )
        ask = engine.is_gradient_accumulation_boundary
        for x, _ in batches:
            ours.append(ask())
            loss = engine(x).mean()
            ours.append(ask())
            engine.backward(loss)
            ours.append(ask())
            engine.step()
            ours.append(ask())
        engine.set_gradient_accumulation_boundary(ask())
        with pytest.raises(elastic.UsageError, match="contradicts the platform"):
            engine.set_gradient_accumulation_boundary(not ask())

    def train_native() -> None:
        """DeepSpeed's own engine, in a generation for its process group."""
        import deepspeed

        model, optimizer = model_and_optimizer()
        config = settings(train_micro_batch_size_per_gpu=micro)
        with user_calls.building():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        ask = engine.is_gradient_accumulation_boundary
        for x, _ in [*DataLoader(Numbers(), batch_size=micro)]:
            theirs.append(ask())
            loss = engine(x).mean()
            theirs.append(ask())
            engine.backward(loss)
            theirs.append(ask())
            engine.step()
            theirs.append(ask())
        engine.destroy()

    run(train, tmp_path, steps=2)
    run(train_native, tmp_path)
    assert ours == theirs
    assert len(ours) == 4 * 12 // micro


def test_deepspeeds_own_initialize_is_answered(tmp_path: Path) -> None:
    """Seen: it trained outside of the platform, which counted no step."""
    steps: list[int] = []

    def train() -> None:
        import deepspeed

        import elastic

        model, optimizer = model_and_optimizer()
        engine, _, loader, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, training_data=Numbers(), config=settings()
        )
        for x, _ in loader:
            one_pass(engine, x)
            steps.append(elastic.get_context().step)

    result = run(train, tmp_path, steps=2)
    assert steps == [1, 2]
    assert result.step == 2


def test_an_engine_made_in_another_way_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine(args=None, model=nn.Linear(1, 1), config=settings())

    spec = GenerationSpec("script", 1, 0, 1)
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path))
    assert (result.kind, "without elastic.initialize" in result.message) == ("usage_error", True)
    import deepspeed

    assert user_calls._initialize is None
    assert deepspeed.initialize is not None


def test_zero_init_takes_a_global_batch_that_the_world_size_does_not_divide(tmp_path: Path) -> None:
    """Seen: DeepSpeed's assertion about batch sizes ended the run when a node was lost."""

    def train() -> None:
        import deepspeed

        import elastic

        # Written for 4 workers: 6 = 2 * 3 * 1 is not so for one.
        config = settings(3, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)
        config["train_batch_size"] = 8
        with deepspeed.zero.Init(config_dict_or_path=config):
            model, optimizer = model_and_optimizer()
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=Numbers(), config=config
        )
        for x, _ in loader:
            one_pass(engine, x)

    spec = GenerationSpec("script", 1, 0, 1, max_world_size=4, batch=BatchSettings(max_steps=2))
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path))
    assert result.kind == "finished", result.traceback


class Counting(nn.Module):
    """Keeps what is no tensor of the model, as FP8 layers and quantisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.seen: dict[str, Any] = {"forwards": 0, "scales": torch.zeros(3)}

    def forward(self, x: torch.Tensor) -> Any:
        self.seen["forwards"] += 1
        self.seen["scales"] = self.seen["scales"] + 0.5
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_extra_state_of_modules_is_carried(stage: int, tmp_path: Path) -> None:
    """Seen: it began anew after every recovery."""
    seen: list[Any] = []

    def train() -> None:
        import elastic

        model = Counting()
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
            training_data=Numbers(),
            config=settings(stage),
        )
        seen.append((model.seen["forwards"], model.seen["scales"].tolist()))
        for x, _ in every_batch(loader):
            one_pass(engine, x)

    run(train, tmp_path, end_at=3)
    run(train, tmp_path, checkpoint=CheckpointStore(str(tmp_path), "script").list()[0].id, steps=4)
    assert seen == [(0, [0.0] * 3), (3, [1.5] * 3)]


@pytest.mark.parametrize("policy", ["rollback", "off"])
def test_sparse_embeddings_in_stage_0(policy: Any, tmp_path: Path) -> None:
    """Seen: the norm of a sparse gradient ended the run, and there was no way to switch the watch off."""

    def train() -> None:
        import elastic

        model = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 1))
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            training_data=Numbers(),
            config=settings(),
        )
        for _, index in loader:
            one_pass(engine, index)

    spec = GenerationSpec("script", 1, 0, 1, batch=BatchSettings(max_steps=2), anomalies=AnomalySettings(policy=policy))
    result, coordinator = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path))
    assert result.kind == "finished", result.traceback
    norm = coordinator.reports[0].grad_norm
    assert norm is None if policy == "off" else norm > 0.0


class Growing(nn.Module):
    """One buffer grows, another appears at the first forward pass."""

    history: torch.Tensor
    late: torch.Tensor

    def __init__(self, first: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.register_buffer("history", torch.zeros(first))

    def forward(self, x: torch.Tensor) -> Any:
        self.history = torch.cat([self.history, x.detach().mean().reshape(1)])
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(2, dtype=torch.int64))
        self.late += 1
        return self.inner(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buffers_that_grow_or_appear_are_restored(stage: int, tmp_path: Path) -> None:
    """Seen: the run ended at its first recovery."""
    seen: list[Any] = []

    first = 1

    def train() -> None:
        import elastic

        model = Growing(first)
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
            training_data=Numbers(),
            config=settings(stage),
        )
        for x, _ in every_batch(loader):
            one_pass(engine, x)
        seen.append((model.history.tolist(), model.late.tolist()))

    run(train, tmp_path / "whole", steps=4)
    run(train, tmp_path, end_at=2)
    newest = CheckpointStore(str(tmp_path), "script").list()[0].id
    run(train, tmp_path, checkpoint=newest, steps=4)
    assert len(seen[0][0]) == 5
    assert seen[0] == seen[1]

    first = 4
    spec = GenerationSpec("script", 3, 0, 1, batch=BatchSettings(max_steps=4), checkpoint=newest)
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path))
    assert "the checkpoint is of another model: 'history' has shape (4,) here" in result.message


def test_the_curves_of_a_monitor_go_on_over_generations(tmp_path: Path) -> None:
    """Seen: each generation wrote a header of its own, and repeated steps stood there twice."""
    folder = tmp_path / "curves"

    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=Numbers(), config=settings(csv_monitor=monitor)
        )
        for x in every_batch(loader):
            one_pass(engine, x[0])
            if engine.global_steps == 2:
                engine.save_checkpoint("anywhere")

    run(train, tmp_path, end_at=3)
    first = next(entry.id for entry in CheckpointStore(str(tmp_path), "script").list() if entry.step == 2)
    run(train, tmp_path, checkpoint=first, steps=4)
    rows = (folder / "job" / "Train_Samples_lr.csv").read_text().split()
    assert rows == ["step,lr", "6,0.001", "12,0.001", "18,0.001", "24,0.001"]


@pytest.mark.parametrize(("section", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_monitor_whose_package_is_missing_is_refused(
    section: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"{section}.enabled: the package {package} is not installed"):
        monitors.refuse_missing({section: {"enabled": True}})
    monitors.refuse_missing({section: {"enabled": False}})


def _steps_by_itself(engine: Any, optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _scales(engine: Any, optimizer: Any, loss: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    engine.backward(scaler.scale(loss))
    scaler.step(optimizer)


def _schedules(engine: Any, optimizer: Any, loss: torch.Tensor) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("habit", "said"),
    [
        # Which of our two sentences, depends on what DeepSpeed makes of it.
        (_steps_by_itself, "engine.backward(loss)"),
        (_scales, "remove the scaler"),
        (_schedules, "build the scheduler on the optimizer that was given"),
    ],
)
def test_a_habit_of_torchs_own_loops_is_answered_with_what_to_write(
    stage: int, habit: Any, said: str, tmp_path: Path
) -> None:
    """Seen: "KeyError: 0", "No inf checks were recorded for this optimizer." and "StandIn is not an Optimizer"."""

    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        engine, optimizer, loader, _ = elastic.initialize(
            model=model,
            optimizer=optimizer,
            training_data=Numbers(),
            config=settings(stage, train_micro_batch_size_per_gpu=3),
        )
        for x, _ in loader:
            habit(engine, optimizer, engine(x).mean())

    spec = GenerationSpec("script", 1, 0, 1, batch=BatchSettings(max_steps=4))
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path), None)
    assert result.kind == "usage_error", result.traceback
    assert said in result.message
    assert "engine.step()" in result.message or habit is _schedules


_CLEARED_BY: dict[str, Callable[..., Any]] = {
    "model": lambda engine, returned, given: engine.module.zero_grad(),
    "engine": lambda engine, returned, given: engine.zero_grad(),
    "optimizer of the engine": lambda engine, returned, given: engine.optimizer.zero_grad(),
    "optimizer returned": lambda engine, returned, given: returned.zero_grad(),
    "optimizer given": lambda engine, returned, given: given.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, False), (2, False), (3, False), (0, True), (1, True)])
def test_the_gradients_of_a_step_are_cleared_by_the_step_alone(
    stage: int, bf16: bool, late: bool, tmp_path: Path
) -> None:
    """Loops of torch's clear them before every backward pass, `late` after the forward pass. Seen: where a step has
    several micro-batches, as it may after a loss, the update was made of the last one's, without a word."""

    def losses(clear: Callable[..., Any]) -> list[float]:
        def train() -> None:
            import elastic

            model, given = model_and_optimizer()
            more = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "bf16": {"enabled": bf16}}
            engine, returned, loader, _ = elastic.initialize(
                model=model, optimizer=given, training_data=Numbers(), config=settings(stage, **more)
            )
            for x, _ in every_batch(loader):
                if not late:
                    clear(engine, returned, given)
                loss = engine(x.bfloat16() if bf16 else x).mean()
                if late:
                    clear(engine, returned, given)
                engine.backward(loss)
                engine.step()

        spec = GenerationSpec("script", 1, 0, 1, batch=BatchSettings(max_steps=3))
        result, coordinator = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path))
        assert result.kind == "finished", result.traceback
        return [report.loss for report in coordinator.reports]

    wanted = losses(lambda engine, returned, given: None)
    assert {who: losses(clear) for who, clear in _CLEARED_BY.items()} == dict.fromkeys(_CLEARED_BY, wanted)


def test_gradients_zeroed_in_place_are_missed(tmp_path: Path) -> None:
    """Out of reach: the model's own memory."""

    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        engine, _, loader, _ = elastic.initialize(
            model=model,
            optimizer=optimizer,
            training_data=Numbers(),
            config=settings(1, train_micro_batch_size_per_gpu=2),
        )
        for x, _ in loader:
            model.zero_grad(set_to_none=False)
            one_pass(engine, x)

    result, _ = run_local(train, None, GenerationSpec("script", 1, 0, 1), host_store("127.0.0.1"), str(tmp_path))
    assert (result.kind, "remove zero_grad()" in result.message) == ("usage_error", True), result


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("micro_batch", [2, 6])
def test_a_clip_that_is_left_in_the_loop(stage: int, micro_batch: int, tmp_path: Path) -> None:
    """As torch's examples have it between backward and step. Seen: each rank clipped its own sums at every micro-batch,
    and losses followed the number of workers. Of a whole step at stage 0 it is what the script means."""

    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        more = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": micro_batch}
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=Numbers(), config=settings(stage, **more)
        )
        for x, _ in loader:
            engine.backward(engine(x).mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            engine.step()

    result, _ = run_local(train, None, GenerationSpec("script", 1, 0, 1), host_store("127.0.0.1"), str(tmp_path))
    refused = stage < 2 and micro_batch == 2
    assert result.kind == ("usage_error" if refused else "finished"), result.traceback
    assert not refused or "give gradient_clipping in the configuration" in result.message


def test_a_loader_that_is_cycled_is_answered_with_what_to_write(tmp_path: Path) -> None:
    def train() -> None:
        import elastic

        model, optimizer = model_and_optimizer()
        engine, _, loader, _ = elastic.initialize(
            model=model, optimizer=optimizer, training_data=Numbers(), config=settings(1)
        )
        batches = itertools.cycle(loader)
        for _ in range(3):
            one_pass(engine, next(batches)[0])

    spec = GenerationSpec("script", 1, 0, 1)
    result, _ = run_local(train, None, spec, host_store("127.0.0.1"), str(tmp_path), None)
    assert (result.kind, result.step) == ("usage_error", 2), result.traceback
    assert "write `while True: for batch in loader`" in result.message

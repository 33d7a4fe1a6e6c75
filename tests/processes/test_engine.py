"""The engine and the loader as the user meets them, in a run, under torchrun and in a plain script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from torch import nn

from elastic.core.data.micro_batches import deal
from elastic.core.data.samples import SampleOrder
from elastic.core.generation_spec import BatchSettings
from elastic.training import rng

pytestmark = pytest.mark.processes

SIZE = 37
BATCH = BatchSettings(epochs=1)


def _plain_torch() -> dict[str, torch.Tensor]:
    """The same training without DeepSpeed, platform or micro-batches: one mean over each global batch."""
    from trainings import Numbers, Small

    rng.seed_everything(0, "build")
    model = Small(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data, order = Numbers(SIZE, torch.float32), SampleOrder(SIZE, 0)
    for step in range(4):
        start, stop = step * 10, min(step * 10 + 10, SIZE)
        samples = []
        for position, index in zip(range(start, stop), order.indices(start, stop), strict=True):
            rng.seed_host(0, "sample", position)
            samples.append(data[index])
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 2])
def test_the_gradient_is_the_mean_over_the_global_batch(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "url": str(tmp_path), "optimizer": "sgd", "schedule": False}
    expected = _plain_torch()
    for world_size in (1, 3):
        outcomes = crew.run(range(world_size), "train_and_tell", config, batch=BATCH)
        for outcome in outcomes:
            assert outcome.result.kind == "finished", outcome.result.traceback
            for name, value in outcome.told["weights"].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", ["model", "evaluation"])
@pytest.mark.parametrize("engine", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"engine": "fsdp2"}], ids=repr)
def test_a_pass_that_is_not_the_engines_in_training_mode(
    crew: Crew, tmp_path: Path, by: str, engine: dict[str, Any]
) -> None:
    """Seen: with FSDP2 every micro-batch made an update of its own; with ZeRO-3 the model's own passes gave other
    gradients. Both without a word."""
    losses = []
    for number, called in enumerate(("engine", by)):
        config = {**engine, "by": called, "url": str(tmp_path / str(number))}
        outcomes = crew.run(range(2), "passes_by", config, batch=BATCH, engine=engine.get("engine", "deepspeed"))
        if (called, engine.get("stage")) == ("model", 3):
            for outcome in outcomes:
                assert outcome.result.kind == "usage_error", outcome.result
                assert "with ZeRO stage 3 call engine(batch), not the model itself" in outcome.result.message
            return
        assert [outcome.result.kind for outcome in outcomes] == ["finished"] * 2, outcomes[0].result.traceback
        losses.append(
            [sum(report.loss for report in reports) for reports in zip(*(o.reports for o in outcomes), strict=True)]
        )
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_a_rank_can_ask_and_reports(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(
        [2, 0, 1], "train_and_tell", {"stage": 1, "url": str(tmp_path)}, batch=BATCH, checkpoint_every_steps=3, seed=5
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.result.kind == "finished", outcome.result.traceback
        assert outcome.result.completed
        told, context = outcome.told, outcome.told["context"]
        assert (context.rank, context.world_size, context.step, context.resumed) == (rank, 3, 0, False)
        assert (str(context.device), context.local_rank, context.run_id) == ("cpu", 0, "run")
        assert (told["device"], told["local_rank"]) == ("cpu", 0)
        assert told["steps"] == 4
        assert told["length"] == told["batches"]
        # DeepSpeed's own count would include the padding.
        assert (told["global_samples"], told["global_steps"], told["train_batch_size"]) == (SIZE, 4, 10)
        # Neither padding passes nor evaluation touch the buffers.
        weighted = [b for step in range(4) for b in deal(step, 10, 2, 3, rank, SIZE) if b.weight > 0]
        assert told["passes"] == len(weighted)
        assert sum(report.samples for report in outcome.reports) == sum(b.samples for b in weighted)
    for step, reports in enumerate(zip(*(outcome.reports for outcome in outcomes), strict=True), start=1):
        assert {report.step for report in reports} == {step}
        assert len({report.grad_norm for report in reports}) == 1
        assert reports[0].grad_norm > 0
        assert len(reports[0].learning_rates) == 1
        assert all(report.duration_s >= report.data_wait_s >= 0 for report in reports)
        # The next update waits for the copy where that is not done yet: after step 3, or within step 4.
        stalls = [report.save_stall_s for report in reports]
        assert all(stall > 0 for stall in stalls) if step == 3 else step == 4 or not any(stalls)


def test_an_evaluation_pass_within_a_step_leaves_its_random_stream_alone(crew: Crew, tmp_path: Path) -> None:
    losses = []
    for fn in ("train", "train_and_tell"):
        config = {"stage": 1, "url": str(tmp_path / fn), "dropout": 0.3}
        (outcome,) = crew.run([0], fn, config, batch=BATCH)
        assert outcome.result.kind == "finished", outcome.result.traceback
        losses.append([report.loss for report in outcome.reports])
    assert losses[0] == losses[1]


_SCRIPT = """
import os, torch, elastic
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
data = [(torch.full((4,), float(i)), torch.tensor([float(i)])) for i in range(13)]
config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
if os.environ.get("ELASTIC_ENGINE") == "fsdp2":
    config = {"global_batch": 4, "micro_batch": 2}
engine, optimizer, loader, scheduler = elastic.initialize(
    model=model, training_data=data, optimizer=torch.optim.SGD(model.parameters(), lr=0.001), config=config
)
for x, y in loader:
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
elastic.state["seen"] = elastic.get_context().step
sums = [p.sum() for p in model.parameters()]
total = sum(float(s.full_tensor() if hasattr(s, "full_tensor") else s) for s in sums)
print(elastic.get_context().rank, elastic.state["seen"], total)
"""


def _script(**environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", _SCRIPT], env=env, text=True, stdout=-1, stderr=-1)


def _said(script: subprocess.Popen[str]) -> list[str]:
    try:
        out, err = script.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        script.kill()
        raise
    assert script.returncode == 0, err
    return out.split()


def test_an_engine_that_is_unknown_outside_of_a_run() -> None:
    _, err = (script := _script(ELASTIC_ENGINE="fsdp3")).communicate(timeout=120)
    assert script.returncode == 1
    assert "engine 'fsdp3' is unknown; the engines are: deepspeed, fsdp2" in err


@pytest.mark.parametrize("engine", ["", "fsdp2"])
def test_a_plain_script_trains_alone_and_under_torchruns_variables(engine: str) -> None:
    alone = _script(ELASTIC_ENGINE=engine)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        _script(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            ELASTIC_ENGINE=engine,
        )
        for rank in range(2)
    ]
    expected = _said(alone)
    assert expected[:2] == ["0", "4"]
    for rank, script in enumerate(ranks):
        said: list[Any] = _said(script)
        assert said[:2] == [str(rank), "4"]
        assert float(said[2]) == pytest.approx(float(expected[2]), rel=1e-5)

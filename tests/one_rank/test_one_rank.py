"""One rank, on the device that is here: precisions, generations that follow each other, and what they leave behind.

On a CUDA device this is NCCL, pinned copies and device memory; elsewhere gloo. One member is enough: everything but the
exchange between ranks is the real thing.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_device import LateDevice
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

pytestmark = [
    pytest.mark.processes,
    # DeepSpeed runs inside the test process here: what it and torch warn of at import and in use is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 6
# What the training function tells the tests.
TOLD: dict[str, Any] = {}


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


def train(config: dict[str, Any]) -> None:
    import elastic

    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        training_data=Numbers(),
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": config["stage"]},
            "zero_allow_untested_optimizer": True,
            **({config["dtype"]: {"enabled": True}} if config["dtype"] != "fp32" else {}),
        },
    )
    assert engine.device.type == DEVICE
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config["dtype"]]
    for _ in elastic.epochs():
        for x, y in loader:
            loss = ((engine(x.to(engine.device, kind)) - y.to(engine.device, kind)) ** 2).float().mean()
            engine.backward(loss)
            engine.step()
            if "early" in config:
                engine.load_weights(config["early"])
            if elastic.get_context().step == config.get("until"):
                break
        else:
            continue
        break
    if "other" in config:
        engine.load_weights(config["other"])
        TOLD["loaded"] = [parameter.detach().clone() for parameter in model.parameters()]
        if "on" in config:
            next(iter(loader))


def generation(number: int, url: Path, config: dict[str, Any], checkpoint: str | None, end_at: int | None) -> Any:
    from elastic.comm.rendezvous import host_store
    from elastic.core.generation_spec import BatchSettings, GenerationSpec
    from elastic.training.local import run_local

    spec = GenerationSpec(
        "gpu", number, 0, 1, batch=BatchSettings(max_steps=STEPS), checkpoint=checkpoint, checkpoint_every_steps=2
    )
    result, coordinator = run_local(train, config, spec, host_store("127.0.0.1"), str(url), end_at)
    assert result.kind == ("ended" if end_at else config.get("ends", "finished")), result.traceback
    TOLD["error"] = result.message
    return coordinator


@pytest.fixture
def half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed believes that a CPU cannot compute in fp16; torch can. What is tested is the loss scaler's way."""
    if DEVICE == "cpu":
        from deepspeed.accelerator import get_accelerator

        monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        monkeypatch.setattr(get_accelerator(), "supported_dtypes", lambda: dtypes)


@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_in_two_generations_equals_the_run_in_one(stage: int, dtype: str, tmp_path: Path) -> None:
    config = {"stage": stage, "dtype": dtype}
    whole = generation(1, tmp_path / "whole", config, None, None)
    first = generation(1, tmp_path / "cut", config, None, 3)
    second = generation(2, tmp_path / "cut", config, "step-00000003-g0001", None)
    cut = [report.loss for report in (*first.reports, *second.reports)]
    # One rank before and after: the same operations in the same order, so nothing may differ at all.
    assert cut == [report.loss for report in whole.reports]
    assert second.restores[0].bytes_read == second.restores[0].bytes_needed


@pytest.mark.parametrize("until", [None, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_weights_after_training_are_the_models_and_the_last_ones_are_saved(
    stage: int, until: int | None, tmp_path: Path
) -> None:
    """At the run's end, or where the function leaves it."""
    from safetensors.torch import save_file

    from elastic.checkpoint.storage import CheckpointStore

    names = ["0.weight", "0.bias", "3.weight", "3.bias"]
    shapes = [(128, 32), (128,), (1, 128), (1,)]
    other = [torch.full(shape, float(number)) for number, shape in enumerate(shapes)]
    (tmp_path / "other").mkdir()
    save_file(dict(zip(names, other, strict=True)), str(tmp_path / "other" / "model.safetensors"))
    config = {"stage": stage, "dtype": "bf16", "until": until}
    generation(1, tmp_path / "plain", config, None, None)
    generation(1, tmp_path / "loaded", {**config, "other": str(tmp_path / "other")}, None, None)
    for one, wanted in zip(TOLD["loaded"], other, strict=True):
        assert torch.equal(one.float(), wanted)
    plain, loaded = (CheckpointStore(str(tmp_path / name), "gpu") for name in ("plain", "loaded"))
    newest = plain.list()[0]
    assert loaded.list()[0] == newest
    assert loaded.manifest(newest.id).digests == plain.manifest(newest.id).digests


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"early": "nowhere"}, "engine.load_weights was called in the middle of step 0"),
        ({"on": True}, "after engine.load_weights, which ends the training"),
    ],
)
def test_other_weights_end_the_training(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    sizes = {"0.weight": (128, 32), "0.bias": (128,), "3.weight": (1, 128), "3.bias": (1,)}
    (tmp_path / "other").mkdir()
    save_file({name: torch.ones(size) for name, size in sizes.items()}, tmp_path / "other" / "model.safetensors")
    config = {"stage": 1, "dtype": "fp32", "until": 2, "other": str(tmp_path / "other"), "ends": "usage_error", **more}
    generation(1, tmp_path / "run", config, None, None)
    assert words in TOLD["error"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_that_is_restored_is_built_without_a_look_at_its_values(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sent parameter by parameter nor formatted for a message: a restore sets all of them."""
    from deepspeed import comm

    from elastic.engines.deepspeed.kind import KIND

    seen: list[str] = []
    watched = [(comm, "broadcast"), (comm, "all_gather_into_tensor"), (torch.nn.Parameter, "__repr__")]
    for owner, name in watched:
        real = getattr(owner, name)

        def call(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            seen.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    built, built_on = type(KIND).build, []

    def build(self: Any, *args: Any) -> Any:
        seen.clear()
        made = built(self, *args)
        built_on.append(set(seen))
        return made

    monkeypatch.setattr(type(KIND), "build", build)
    config = {"stage": stage, "dtype": "fp32"}
    generation(1, tmp_path, config, None, 3)
    generation(2, tmp_path, config, "step-00000003-g0001", None)
    assert built_on == [{"broadcast", "all_gather_into_tensor"} if stage == 3 else {"broadcast"}, set()]


@pytest.mark.skipif(DEVICE != "cpu", reason="the restores of the test above take a device's way here")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_restore_by_way_of_a_devices_buffers_is_the_same(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of 256 bytes that are copied as late as can be; the weights are longer than several of them."""
    from elastic.training.state import reading

    config = {"stage": stage, "dtype": "bf16"}
    whole = generation(1, tmp_path / "whole", config, None, None)
    first = generation(1, tmp_path / "cut", config, None, 3)
    device, read = LateDevice(), reading._read
    with monkeypatch.context() as patch:
        patch.setattr(reading, "enqueues", lambda device: True)
        patch.setattr(reading, "DeviceStream", lambda _: device)
        patch.setattr(reading, "_read", lambda source, manifest, ranges, _: read(source, manifest, ranges, 256))
        second = generation(2, tmp_path / "cut", config, "step-00000003-g0001", None)
    assert [report.loss for report in (*first.reports, *second.reports)] == [report.loss for report in whole.reports]
    assert second.restores[0].bytes_read == second.restores[0].bytes_needed
    assert len(device.seen) > 10


def test_a_steps_duration_contains_the_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are only enqueued: a step is over when its loss is read, which takes five seconds here."""
    # What it takes the clock from must not be imported with this one.
    importlib.import_module("elastic.training.step_loop")
    read, clock, late_s = torch.Tensor.__float__, time.perf_counter, [0.0]

    def read_late(tensor: torch.Tensor) -> float:
        late_s[0] += 5.0
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "__float__", read_late)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late_s[0])
    coordinator = generation(1, tmp_path, {"stage": 1, "dtype": "fp32"}, None, None)
    assert [report.duration_s >= 5.0 for report in coordinator.reports] == [True] * STEPS


@pytest.mark.parametrize("call", ["forward", "backward", "step"])
def test_a_graph_around_the_engine_is_refused_by_name(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be replayed past the loader, the snapshots and the reports."""
    from elastic.comm.rendezvous import host_store
    from elastic.core.generation_spec import BatchSettings, GenerationSpec
    from elastic.training import engine as engine_module
    from elastic.training.local import run_local

    made = iter(range(9))
    captured = {"forward": 0, "backward": 1, "step": 2}[call]
    monkeypatch.setattr(engine_module, "capturing", lambda device: next(made) == captured)
    spec = GenerationSpec("gpu", 1, 0, 1, batch=BatchSettings(max_steps=STEPS))
    result, _ = run_local(train, {"stage": 1, "dtype": "fp32"}, spec, host_store("127.0.0.1"), str(tmp_path), None)
    assert result.kind == "usage_error"
    assert f"engine.{call} was called while a CUDA graph is captured" in str(result.message)


def test_on_a_device_the_time_in_collectives_is_read_after_the_steps_synchronisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it the device has passed hardly any of the step's events."""
    from elastic.comm.collective_ledger import CollectiveLedger

    seen, read = list[str](), torch.Tensor.__float__

    def reading(tensor: torch.Tensor) -> float:
        seen.append("the loss is read")
        return read(tensor)

    def passed_s(ledger: CollectiveLedger) -> float:
        seen.append("the ledger is asked")
        return 1e-4

    monkeypatch.setattr(CollectiveLedger, "on_device", True)
    monkeypatch.setattr(CollectiveLedger, "passed_s", passed_s)
    monkeypatch.setattr(torch.Tensor, "__float__", reading)
    coordinator = generation(1, tmp_path, {"stage": 1, "dtype": "fp32"}, None, None)
    before = [seen[at - 1] for at, what in enumerate(seen) if what == "the ledger is asked"]
    assert before == ["the loss is read"] * STEPS
    in_collectives = [report.duration_s - report.noncollective_s for report in coordinator.reports]
    assert in_collectives == [pytest.approx(1e-4)] * STEPS


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device here")
@pytest.mark.parametrize("stage", [2, 3])
def test_rebuilding_leaves_no_device_memory_behind(stage: int, tmp_path: Path) -> None:
    used, reserved = [], []
    for number in range(1, 8):
        generation(number, tmp_path / str(number), {"stage": stage, "dtype": "bf16"}, None, None)
        gc.collect()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    # The first generations fill caches that the process keeps.
    assert used[-1] <= used[2]
    assert reserved[-1] <= reserved[2] + (64 << 20), "fragments of older generations"

"""Weights out of a run and into another: DeepSpeed's own loader, and runs that begin from what another left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

pytestmark = [
    pytest.mark.processes,
    # DeepSpeed runs inside the test process here: what it and torch warn of at import and in use is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 4


class Tied(torch.nn.Module):
    """Tied weights, a frozen parameter, buffers in and out of the state_dict."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Linear(8, 8, bias=False)
        self.outer = torch.nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.register_buffer("passes", torch.zeros(8))
        self.scale = torch.nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.outer(torch.relu(self.inner(x))) * self.scale.to(x.dtype)


class Vectors(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def config(stage: int, bf16: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if bf16 else {}),
        **more,
    }


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Weights and buffers as DeepSpeed gathers them, which shares nothing with our reading. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found = {"passes": engine.module.passes.clone()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and engine.zero_optimization_stage():
            found[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
    return found


def train(settings: dict[str, Any]) -> None:
    model = Tied(settings.get("seed", 0))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2),
        training_data=Vectors(),
        config=config(settings["stage"], settings.get("bf16", False)),
        weights=settings.get("weights"),
    )
    if "begun" in settings:
        torch.save(gathered(engine), settings["begun"])
    dtype = next(model.parameters()).dtype
    for x in loader:
        engine.backward((engine(x.to(dtype)) - x.to(dtype)).pow(2).float().mean())
        engine.step()


def run(url: Path, name: str, settings: dict[str, Any], steps: int = STEPS) -> Path:
    """A run of one rank to its end; the folder of its newest checkpoint."""
    from elastic.checkpoint.storage import CheckpointStore
    from elastic.comm.rendezvous import host_store
    from elastic.core.generation_spec import BatchSettings, GenerationSpec
    from elastic.training.local import run_local

    batch = BatchSettings(max_steps=steps)
    spec = GenerationSpec(name, 1, 0, 1, batch=batch, checkpoint=None, checkpoint_every_steps=2)
    result, _ = run_local(train, settings, spec, host_store("127.0.0.1"), str(url), None)
    assert result.kind == "finished", result.traceback or result.error
    newest = CheckpointStore(str(url), name).list()[0]
    return url / name / "checkpoints" / newest.id


_READER = """
import sys, torch, deepspeed, json
import torch.distributed as dist
import test_interchange as made
folder, weights, stage, bf16 = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = made.Tied(seed=9)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.5),
    config=made.config(stage, bf16, checkpoint={"load_universal": True}),
    dist_init_required=False,
)
path, client = engine.load_checkpoint(folder, load_lr_scheduler_states=False)
assert path is not None
wanted = torch.load(weights, weights_only=True)
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
for name, parameter in engine.module.named_parameters():
    if parameter.requires_grad:
        assert torch.equal(safe_get_full_fp32_param(parameter), wanted[name]), name
        assert safe_get_full_optimizer_state(parameter, "exp_avg").abs().sum() > 0, name
assert engine.global_steps == made.STEPS, engine.global_steps
assert engine.optimizer.param_groups[0]["lr"] == 0.01
print("loaded")
"""


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, True), (3, False)])
def test_deepspeed_loads_a_universal_export(tmp_path: Path, stage: int, bf16: bool) -> None:
    checkpoint = run(tmp_path, "first", {"stage": stage, "bf16": bf16})
    folder = elastic.export(checkpoint, tmp_path / "universal", to="deepspeed-universal")
    weights = elastic.export(checkpoint, tmp_path / "weights", to="torch") / "model.pt"
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    arguments = [sys.executable, "-c", _READER, str(folder), str(weights), str(stage), str(bf16)]
    ran = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=200)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    assert "loaded" in ran.stdout


_WRITER = """
import sys, torch, deepspeed
import torch.distributed as dist
import test_interchange as made
folder, stage, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
dist.init_process_group("gloo", init_method=f"file://{folder}-store", rank=rank, world_size=world)
model = made.Tied(seed=5)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1),
    config=made.config(stage, train_batch_size=6),
    dist_init_required=False,
)
data = made.Vectors()
for step in range(2):
    engine.backward((engine(torch.stack([data[8 * step + i] for i in range(8)])) - 1).pow(2).mean())
    engine.step()
engine.save_checkpoint(folder)
full = made.gathered(engine)
if rank == 0:
    torch.save(full, f"{folder}-wanted")
dist.barrier()
"""


def native_checkpoint(folder: Path, stage: int, world: int) -> dict[str, torch.Tensor]:
    """A checkpoint by DeepSpeed alone, of `world` ranks; returns the weights that DeepSpeed itself gathers."""
    here = str(Path(__file__).parent)
    base = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    base |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder), str(stage), str(rank), str(world)],
            env=base | {"RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return torch.load(f"{folder}-wanted", weights_only=True)


def same(begun: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = torch.load(begun, weights_only=True)
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].float(), tensor.float()), name


class TestBeginFrom:
    @pytest.mark.parametrize(("stage", "to"), [(1, "safetensors"), (3, "torch"), (0, "deepspeed-universal"), (2, None)])
    def test_what_another_run_left_in_any_format(self, tmp_path: Path, stage: int, to: Any) -> None:
        checkpoint = run(tmp_path, "first", {"stage": 2})
        wanted = torch.load(elastic.export(checkpoint, tmp_path / "w", to="torch") / "model.pt", weights_only=True)
        wanted = {name: wanted[name] for name in ("inner.weight", "outer.bias", "scale", "passes")}
        source = tmp_path / "first" if to is None else elastic.export(checkpoint, tmp_path / "out", to=to)
        begun = tmp_path / "begun"
        run(tmp_path, "second", {"stage": stage, "seed": 7, "weights": str(source), "begun": str(begun)}, steps=1)
        same(begun, wanted)

    @pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 3)])
    def test_a_native_checkpoint_of_another_world_size(self, tmp_path: Path, stage: int, world: int) -> None:
        wanted = native_checkpoint(tmp_path / "native", stage, world)
        begun = tmp_path / "begun"
        weights = {"source": str(tmp_path / "native"), "allow_pickle": True}
        run(tmp_path, "second", {"stage": 2, "seed": 7, "weights": weights, "begun": str(begun)}, steps=1)
        same(begun, wanted)

    def test_a_damaged_checkpoint_is_refused(self, tmp_path: Path) -> None:
        checkpoint = run(tmp_path, "first", {"stage": 1})
        shard = next(checkpoint.glob("*.safetensors"))
        raw = bytearray(shard.read_bytes())
        begin = 8 + int.from_bytes(raw[:8], "little")
        raw[begin:] = bytes(byte ^ 1 for byte in raw[begin:])
        shard.write_bytes(raw)
        with pytest.raises(AssertionError, match="the checkpoint is damaged"):
            run(tmp_path, "second", {"stage": 1, "weights": str(checkpoint)}, steps=1)

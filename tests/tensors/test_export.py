"""Exports, each read back by the library that it is for."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from elastic_jobs import cli

import elastic
from elastic.checkpoint.folder import explain
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.settings import WeightsSettings
from elastic.core.sharding.layout import Chunk, RankLayout, merged
from elastic.interchange.weights import open_weights

ALIASES = {"head": "emb"}
STATE_DICT = [name for name in samples.SHAPES if name != "flag"]


def full_state() -> dict[str, dict[str, torch.Tensor]]:
    full = samples.state()
    full["master"] = full.pop("fp32")
    return full


def write(storage: Path, kind: str = "zero3", world: int = 3, step: int = 40, **extra: Any) -> Path:
    """A checkpoint of the sample model as `world` ranks of a ZeRO stage write it; the folder that it is in."""
    store = CheckpointStore(str(storage), "run")
    said = {"fleeting_buffers": ["flag"], "model": {"aliases": ALIASES}, **extra}
    records = [
        store.write_shard(replace(snapshot, extra_state=said if snapshot.rank == 0 else None))
        for snapshot in samples.snapshots(samples.written(kind, world), full_state(), step=step)
    ]
    manifest = assemble(records, run_id="run")
    store.commit(manifest)
    return storage / "run" / "checkpoints" / manifest.id


def write_with_registered(storage: Path) -> Path:
    """As a run writes it that has registered an EMA of two tensors and a generator."""
    store, full, layout = CheckpointStore(str(storage), "run"), full_state(), samples.written("zero12", 2)
    kept = {"state/ema/0": torch.randn(12), "state/ema/1": torch.randn(3)}
    said = {"fleeting_buffers": ["flag"], "model": {"aliases": ALIASES}, "caller": {"objects": {"rng": {}, "ema": {}}}}
    records = []
    for snapshot in samples.snapshots(layout, full):
        own = kept if snapshot.rank == 0 else {}
        chunks = tuple(Chunk(name, 0, value.numel(), name, 0) for name, value in own.items())
        buffers = {name: value.numel() for name, value in own.items()}
        shapes = {**samples.SHAPES, **{name: tuple(value.shape) for name, value in kept.items()}}
        tensors = {**snapshot.tensors, **{f"kept/{name}": value for name, value in own.items()}}
        made = replace(
            snapshot, parameters=shapes, layout=merged(snapshot.layout, RankLayout(chunks, buffers)), tensors=tensors,
            extra_state=said if snapshot.rank == 0 else None,
        )  # fmt: skip
        records.append(store.write_shard(made))
    manifest = assemble(records, run_id="run")
    store.commit(manifest)
    return storage / "run" / "checkpoints" / manifest.id


def whole(name: str) -> torch.Tensor:
    full = full_state()
    return (full["master"] | full["param"] | full["buffer"])[name].view(samples.SHAPES[name])


def same(found: dict[str, torch.Tensor], names: list[str] = STATE_DICT) -> None:
    assert sorted(found) == sorted(names)
    for name in names:
        wanted = whole(ALIASES.get(name, name))
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize(("kind", "world"), [("zero0", 2), ("zero12", 1), ("zero12", 4), ("zero3", 7)])
def test_safetensors_holds_the_whole_tensors_of_any_layout(tmp_path: Path, kind: str, world: int) -> None:
    folder = elastic.export(write(tmp_path / "runs", kind, world), tmp_path / "out")
    same(safetensors.torch.load_file(folder / "model.safetensors"))


def test_torch_loads_it_without_trusting_it(tmp_path: Path) -> None:
    folder = elastic.export(write(tmp_path / "runs"), tmp_path / "out", to="torch")
    same(torch.load(folder / "model.pt", weights_only=True), [*STATE_DICT, "head"])


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_registered_objects_are_left_out_by_name(tmp_path: Path, to: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = elastic.export(write_with_registered(tmp_path / "runs"), tmp_path / "out", to=to)
    assert json.loads((folder / "elastic-export.json").read_text())["left_out"] == ["ema", "rng"]
    assert "is not: ema, rng" in caplog.text
    assert not [path for path in folder.rglob("*") if "ema" in path.name]
    if to == "torch":
        same(torch.load(folder / "model.pt", weights_only=True), [*STATE_DICT, "head"])


def test_a_run_begins_with_the_weights_of_one_that_has_registered_objects(tmp_path: Path) -> None:
    weights = open_weights(WeightsSettings(str(write_with_registered(tmp_path / "runs"))))
    assert sorted(weights.shapes) == sorted([*STATE_DICT, "head"])


# torch says that one process loads alone, which is what is meant here.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_it(tmp_path: Path) -> None:
    folder = elastic.export(write(tmp_path / "runs"), tmp_path / "out", to="dcp")
    found = {name: torch.zeros_like(whole(ALIASES.get(name, name))) for name in [*STATE_DICT, "head"]}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    same(found, [*STATE_DICT, "head"])


class TestSharedTensors:
    def test_torch_gives_them_one_memory(self, tmp_path: Path) -> None:
        folder = elastic.export(write(tmp_path / "runs"), tmp_path / "out", to="torch")
        found = torch.load(folder / "model.pt", weights_only=True)
        assert found["head"].data_ptr() == found["emb"].data_ptr()

    def test_safetensors_loads_them_into_a_model_that_shares_them(self, tmp_path: Path) -> None:
        folder = elastic.export(write(tmp_path / "runs"), tmp_path / "out")
        model = torch.nn.Module()
        for name in STATE_DICT:
            owner = model
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(whole(name))))
        model.register_parameter("head", model.emb)
        missing, unexpected = safetensors.torch.load_model(model, folder / "model.safetensors")
        assert not missing
        assert not unexpected
        assert torch.equal(model.head, whole("emb"))


class TestWhatIsChosen:
    def test_dtype_casts_floating_point_alone(self, tmp_path: Path) -> None:
        folder = elastic.export(write(tmp_path / "runs", fleeting_buffers=[]), tmp_path / "out", dtype="bfloat16")
        found = safetensors.torch.load_file(folder / "model.safetensors")
        assert found["emb"].dtype == found["frozen"].dtype == torch.bfloat16
        assert found["flag"].dtype == torch.bool
        assert torch.equal(found["emb"], whole("emb").to(torch.bfloat16))

    def test_large_models_are_in_several_files_with_an_index(self, tmp_path: Path) -> None:
        folder = elastic.export(write(tmp_path / "runs"), tmp_path / "out", max_file_bytes=500)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 1
        assert files == sorted(path.name for path in folder.glob("*.safetensors"))
        found = {}
        for file in files:
            part = safetensors.torch.load_file(folder / file)
            assert set(part) == {name for name, where in index["weight_map"].items() if where == file}
            found |= part
        same(found)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())

    def test_a_run_stands_for_its_newest_checkpoint(self, tmp_path: Path) -> None:
        write(tmp_path / "runs", step=40)
        write(tmp_path / "runs", "zero12", 2, step=60)
        folder = elastic.export(tmp_path / "runs" / "run", tmp_path / "out")
        assert json.loads((folder / "elastic-export.json").read_text())["step"] == 60

    def test_a_checkpoint_may_have_been_copied(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        moved = write(tmp_path / "runs").rename(tmp_path / "elsewhere" / "best")
        same(safetensors.torch.load_file(elastic.export(moved, tmp_path / "out") / "model.safetensors"))

    def test_a_checkpoint_of_ray_train_is_taken_as_it_is(self, tmp_path: Path) -> None:
        from ray.train import Checkpoint

        checkpoint = Checkpoint(str(write(tmp_path / "runs")))
        same(safetensors.torch.load_file(elastic.export(checkpoint, tmp_path / "out") / "model.safetensors"))


def test_the_documented_format_is_enough_for_another_reader(tmp_path: Path) -> None:
    """docs/checkpoints.md, "Another reader", with json and safetensors alone."""
    folder = write(tmp_path / "runs")
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    words, columns = manifest["words"], manifest["columns"]
    found = {name: torch.zeros(math.prod(shape)) for name, shape in manifest["parameters"].items()}
    for shard in manifest["shards"]:
        stored = safetensors.torch.load_file(folder / shard["file"])
        for name, start, numel, buffer, offset in zip(*(columns[index] for index in shard["pieces"]), strict=True):
            for kind in ("master", "param", "buffer"):
                part = stored.get(f"{kind}/{words[buffer]}")
                if part is not None:
                    whole_one = found[words[name]] = found[words[name]].to(part.dtype)
                    whole_one[start : start + numel] = part[offset : offset + numel]
    same({name: tensor.view(manifest["parameters"][name]) for name, tensor in found.items()}, list(samples.SHAPES))


def test_a_folder_says_how_it_is_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path / "runs")
    explain(str(folder))
    assert "elastic export PATH" in (folder / "README.md").read_text()
    same(safetensors.torch.load_file(elastic.export(folder, tmp_path / "out") / "model.safetensors"))


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"to": "onnx"}, "no export to 'onnx'"),
            ({"dtype": "int8"}, "not 'int8'"),
            ({"to": "hf"}, "does not say which Hugging Face model"),
            ({"config": "x"}, "belongs to an export to hf"),
            ({"to": "deepspeed-universal", "dtype": "bf16"}, "always float32"),
        ],
    )
    def test_in_one_sentence_and_nothing_is_left(self, tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
        checkpoint = write(tmp_path / "runs")
        with pytest.raises(UsageError, match=words):
            elastic.export(checkpoint, tmp_path / "out", **arguments)
        assert os.listdir(tmp_path) == ["runs"]

    def test_a_folder_with_something_else_in_it_is_never_replaced(self, tmp_path: Path) -> None:
        checkpoint, mine = write(tmp_path / "runs"), tmp_path / "mine"
        mine.mkdir()
        (mine / "thesis.tex").write_text("chapter 1")
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=r"not empty|not an earlier export"):
                elastic.export(checkpoint, mine, overwrite=overwrite)
        assert (mine / "thesis.tex").read_text() == "chapter 1"

    def test_an_earlier_export_is_replaced_when_asked(self, tmp_path: Path) -> None:
        checkpoint = write(tmp_path / "runs")
        elastic.export(checkpoint, tmp_path / "out", to="torch")
        with pytest.raises(UsageError, match="--overwrite"):
            elastic.export(checkpoint, tmp_path / "out")
        folder = elastic.export(checkpoint, tmp_path / "out", overwrite=True)
        assert sorted(os.listdir(folder)) == ["elastic-export.json", "model.safetensors"]

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        checkpoint, target = write(tmp_path / "runs"), tmp_path / "target"
        target.mkdir()
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(UsageError, match="symbolic link"):
            elastic.export(checkpoint, tmp_path / "link")
        assert not os.listdir(target)

    def test_a_damaged_checkpoint_leaves_nothing_that_looks_whole(self, tmp_path: Path) -> None:
        checkpoint = write(tmp_path / "runs")
        shard = checkpoint / "rank-00001-of-00003.safetensors"
        raw = bytearray(shard.read_bytes())
        for at in range(len(raw) // 2, len(raw)):
            raw[at] ^= 1
        shard.write_bytes(raw)
        with pytest.raises(IntegrityError, match="is not what was written"):
            elastic.export(checkpoint, tmp_path / "out", to="torch")
        assert os.listdir(tmp_path) == ["runs"]

    def test_names_that_lead_out_of_the_folder(self, tmp_path: Path) -> None:
        from elastic.interchange.output_folder import output_folder

        with pytest.raises(IntegrityError, match="not a path below"), output_folder(tmp_path / "out", {}, False) as out:
            out.write("zero/../../x/fp32.pt", "")
        assert os.listdir(tmp_path) == []


_MEASURE = """
import sys, torch
from pathlib import Path
from elastic_jobs import cli

import elastic
import torch.distributed.checkpoint
from elastic.interchange import export as module

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

small, large, to = sys.argv[1:]
elastic.export(small, small + "-" + to, to=to)  # imports everything
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = field("VmRSS:")
elastic.export(large, large + "-" + to, to=to)
print(field("VmHWM:") - before)
"""


@pytest.mark.wide
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "deepspeed-universal"])
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, to: str) -> None:
    """96 tensors of 4 MiB, 384 MiB in all: the export may take 8 of them, for reading and casting and the allocator."""
    largest, count = 4 << 20, 96
    small, large = big_model(tmp_path / "small", 2, 1024), big_model(tmp_path / "large", count, largest // 4)
    ran = subprocess.run([sys.executable, "-c", _MEASURE, small, large, to], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    peak = int(ran.stdout.split()[-1])
    assert peak < 8 * largest, f"{peak / 2**20:.0f} MiB"


def big_model(storage: Path, count: int, numel: int) -> str:
    """A checkpoint of `count` tensors of `numel` float32, as two ranks of stage 3 write it."""
    from elastic.checkpoint.snapshot import ShardSnapshot
    from elastic.core.sharding.zero import zero3_layout

    names = [f"layers.{number}" for number in range(count)]
    layout = zero3_layout([[(name, numel) for name in names]], 2)
    extra = {
        "optimizer": {"class": "SGD", "groups": [{"names": names, "hyper": {"lr": 0.1}}], "scalars": []},
        "engine": {"global_steps": 1, "global_samples": 1, "skipped_steps": 0},
        "scheduler": None,
    }
    store = CheckpointStore(str(storage), "run")
    records = []
    for rank, own in enumerate(layout.ranks):
        tensors = {f"master/{buffer}": torch.ones(length) for buffer, length in own.buffers.items()}
        records.append(
            store.write_shard(
                ShardSnapshot(
                    run_id="run", generation=1, rank=rank, world_size=2, step=1, zero_stage=3, layout=own,
                    tensors=tensors, parameters=dict.fromkeys(names, (numel,)), extra_state=None if rank else extra,
                )
            )
        )  # fmt: skip
    store.commit(assemble(records, run_id="run"))
    return str(storage / "run")


class TestCommand:
    """`elastic export`, as it is typed."""

    def test_a_checkpoint_by_its_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write(tmp_path / "runs")
        assert cli.main(["export", str(folder), "--to", "safetensors", str(tmp_path / "out")], backend=None) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "out")
        same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))

    def test_a_run_by_its_name_and_one_of_its_checkpoints(self, tmp_path: Path) -> None:
        from elastic_jobs.run_folder import RunFolder
        from elastic_jobs.running.run_plan import Job

        from elastic.core.settings import CheckpointSettings, RunSettings

        older = write(tmp_path / "runs", step=40)
        write(tmp_path / "runs", step=60)
        runs = str(tmp_path / "runs")
        settings = RunSettings("run", checkpoint=CheckpointSettings(runs), storage_url=runs)
        RunFolder(runs, "run").claim(Job(settings, "train:main", {}, str(tmp_path)).record())
        common = ["export", "run", "--storage", runs, "--to", "torch"]
        assert cli.main([*common, str(tmp_path / "newest")]) == 0
        assert cli.main([*common, str(tmp_path / "older"), "--checkpoint", older.name]) == 0
        steps = [json.loads((tmp_path / n / "elastic-export.json").read_text())["step"] for n in ("newest", "older")]
        assert steps == [60, 40]
        assert cli.main([*common, str(tmp_path / "x"), "--checkpoint", "../../other"]) != 0

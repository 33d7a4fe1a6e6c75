"""Exports for Hugging Face, read by transformers. The model's description in the checkpoint needs no transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import elastic
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.errors import UsageError
from elastic.core.sharding.layout import merged
from elastic.core.sharding.zero import owner_layout, zero3_layout
from elastic.engines.model.description import describe
from elastic.engines.model.plain_names import named_buffers, named_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight


class TestDescription:
    def test_every_further_name_of_a_shared_tensor_is_kept(self) -> None:
        assert describe(Tied()) == {"class": "Tied", "aliases": {"two.weight": "one.weight"}, "hugging_face": None}

    def test_a_configuration_that_cannot_be_read_costs_the_export_only(self) -> None:
        class Broken:
            def to_json_string(self) -> str:
                raise ValueError("a set is not JSON")

        model = Tied()
        model.config = Broken()
        model.save_pretrained = lambda: None
        assert describe(model)["hugging_face"] is None


def checkpoint_of(model: nn.Module, storage: Path, world: int = 2) -> Path:
    """A checkpoint of the model as `world` ranks of stage 3 write it, without training."""
    trained = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    frozen = {name: p for name, p in named_parameters(model) if not p.requires_grad}
    buffers = {name: buffer for name, buffer in named_buffers(model) if buffer.numel()}
    whole = {f"param/{name}": p for name, p in frozen.items()} | {f"buffer/{name}": b for name, b in buffers.items()}
    layout = zero3_layout([[(name, p.numel()) for name, p in trained.items()]], world)
    ours = owner_layout([(name, tensor.numel()) for name, tensor in (frozen | buffers).items()], world)
    extra = {"model": describe(model), "fleeting_buffers": [n for n in buffers if n not in model.state_dict()]}
    shapes = {name: tuple(tensor.shape) for name, tensor in (trained | frozen | buffers).items()}
    store, records = CheckpointStore(str(storage), "run"), []
    for rank, own in enumerate(layout.ranks):
        tensors = {f"master/{name}": torch.zeros(length) for name, length in own.buffers.items()}
        for chunk in own.chunks:
            part = trained[chunk.name].reshape(-1)[chunk.start : chunk.stop]
            tensors[f"master/{chunk.buffer}"][chunk.offset : chunk.offset + chunk.numel] = part
        held = ours.ranks[rank] if whole else own
        if whole:
            tensors |= {key: t.detach().reshape(-1) for key, t in whole.items() if key.split("/")[1] in held.buffers}
        snapshot = ShardSnapshot(
            run_id="run", generation=1, rank=rank, world_size=world, step=1, zero_stage=3,
            layout=merged(own, held) if whole else own, tensors=tensors, parameters=shapes,
        )  # fmt: skip
        records.append(store.write_shard(replace(snapshot, extra_state=extra if rank == 0 else None)))
    manifest = assemble(records, run_id="run")
    store.commit(manifest)
    return storage / "run" / "checkpoints" / manifest.id


class TestFromPretrained:
    @pytest.fixture
    def transformers(self) -> Any:
        return pytest.importorskip("transformers", reason="the extra `hf` is not installed")

    def tiny(self, transformers: Any) -> Any:
        return base()

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_the_model_is_the_one_that_was_trained(self, tmp_path: Path, transformers: Any, wrapped: bool) -> None:
        model = self.tiny(transformers)
        trained = nn.ModuleDict({"lm": model, "extra": nn.Linear(2, 2)}) if wrapped else model
        folder = elastic.export(checkpoint_of(trained, tmp_path), tmp_path / "hf", to="hf", max_file_bytes=2000)
        found = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        tokens = torch.arange(10).reshape(2, 5)
        assert type(found) is type(model)
        assert torch.equal(found(tokens).logits, model(tokens).logits)
        assert found.lm_head.weight is found.transformer.wte.weight

    @pytest.mark.filterwarnings("ignore")
    def test_a_dtype_is_said_in_the_configuration_too(self, tmp_path: Path, transformers: Any) -> None:
        model = self.tiny(transformers)
        folder = elastic.export(checkpoint_of(model, tmp_path), tmp_path / "hf", to="hf", dtype="bf16")
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")
class TestAdapters:
    TOKENS = torch.arange(10).reshape(2, 5)

    def adapted(self, config: Any, seed: int = 3) -> Any:
        """None of its adapters' weights is zero, as some begin."""
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(base(), config)
        return self.filled(model, seed)

    def filled(self, model: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        return model.eval()

    @pytest.mark.parametrize("wrapped", [False, True])
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("LoraConfig", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
            ("LoraConfig", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True, "bias": "all"}),
            ("LoraConfig", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["ln_f"]}),
            ("LoraConfig", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}),
            ("IA3Config", {"target_modules": ["c_attn"], "feedforward_modules": []}),
        ],
    )
    def test_are_what_peft_itself_writes(
        self, tmp_path: Path, kind: str, options: dict[str, Any], wrapped: bool
    ) -> None:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = self.adapted(getattr(peft, kind)(**options))
        for block in model.get_base_model().transformer.h if wrapped else ():
            block.attn = checkpoint_wrapper(block.attn)
        trained = nn.ModuleDict({"lm": model}) if wrapped else model
        folder = elastic.export(checkpoint_of(trained, tmp_path), tmp_path / "hf", to="hf")
        assert sorted(path.name for path in folder.iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors", "elastic-export.json",
        ]  # fmt: skip
        found = peft.PeftModel.from_pretrained(base(), folder).eval()
        assert torch.equal(found(self.TOKENS).logits, model(self.TOKENS).logits)
        if not wrapped:
            model.save_pretrained(tmp_path / "own")
            written, own = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "own"))
            assert written.keys() == own.keys()
            assert all(torch.equal(written[name], own[name]) for name in own)
            configs = [json.loads((path / "adapter_config.json").read_text()) for path in (folder, tmp_path / "own")]
            assert configs[0] == configs[1]

    def test_several_lie_where_peft_looks_for_them(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        options = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
        model = self.adapted(peft.LoraConfig(**options))
        model.add_adapter("other", peft.LoraConfig(r=4, **options))
        self.filled(model, 5)
        folder = elastic.export(checkpoint_of(model, tmp_path), tmp_path / "hf", to="hf", dtype="bf16")
        found = peft.PeftModel.from_pretrained(base(), folder)
        found.load_adapter(folder / "other", "other")
        for name in ("default", "other"):
            model.set_adapter(name)
            found.set_adapter(name)
            own, written = (peft.get_peft_model_state_dict(each, adapter_name=name) for each in (model, found))
            assert all(torch.equal(written[key], own[key].bfloat16().float()) for key in own)

    def test_that_were_injected_into_the_model_itself(self, tmp_path: Path) -> None:
        """As transformers' own integration does it."""
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), base())
        self.filled(model, 3)
        folder = elastic.export(checkpoint_of(model, tmp_path), tmp_path / "hf", to="hf")
        found = peft.PeftModel.from_pretrained(base(), folder).eval()
        assert torch.equal(found(self.TOKENS).logits, model(self.TOKENS).logits)

    def test_what_is_not_all_that_was_trained_is_refused(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = self.adapted(peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
        model.get_base_model().transformer.wpe.weight.requires_grad_(True)
        checkpoint = checkpoint_of(model, tmp_path)
        with pytest.raises(UsageError, match=r"wpe.weight' \(1 in all\), which was trained, is none of them: write"):
            elastic.export(checkpoint, tmp_path / "hf", to="hf")
        assert not (tmp_path / "hf").exists()
        assert (elastic.export(checkpoint, tmp_path / "all", to="safetensors") / "model.safetensors").exists()

    def test_of_other_shapes_than_the_models_tensors_are_refused(self, tmp_path: Path) -> None:
        """Seen: `from_pretrained` found none of the names and began with random weights, with a warning."""
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = self.adapted(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        with pytest.raises(UsageError, match=r"PEFT \(default\), and does not say which.*trainer\.save_model"):
            elastic.export(checkpoint_of(model, tmp_path), tmp_path / "hf", to="hf")


def base() -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    torch.manual_seed(3)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=17, n_positions=12)
    return transformers.GPT2LMHeadModel(config).eval()


class TestConfigurationFromAFolder:
    def test_is_copied_and_weights_are_not(self, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text('{"model_type": "gpt2", "torch_dtype": "float16"}')
        (base / "tokenizer.json").write_text("{}")
        (base / "model.safetensors.index.json").write_text("{}")
        (base / "model.safetensors").write_bytes(b"old")
        folder = elastic.export(checkpoint_of(Tied(), tmp_path), tmp_path / "hf", to="hf", config=base)
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json", "elastic-export.json", "model.safetensors", "tokenizer.json",
        ]  # fmt: skip
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "gpt2", "dtype": "float32"}
        assert (folder / "model.safetensors").read_bytes() != b"old"

    def test_without_config_json_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no config\.json"):
            elastic.export(checkpoint_of(Tied(), tmp_path), tmp_path / "hf", to="hf", config=tmp_path)

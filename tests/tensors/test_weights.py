"""What a run can begin with: formats, names that must fit, and pickles that are not trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from elastic.core.errors import IntegrityError, ModelMismatch, UsageError
from elastic.core.settings import RunSettings, WeightsSettings
from elastic.interchange.weights import match_names, open_weights

STATE = {
    "a": torch.arange(6.0).view(2, 3),
    "b.c": torch.arange(4, dtype=torch.int64),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
}


def opened(folder: Path, **settings: Any) -> Any:
    return open_weights(WeightsSettings(str(folder), **settings))


def holds(weights: Any, state: dict[str, torch.Tensor]) -> None:
    assert dict(weights.shapes) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in state.items():
        assert torch.equal(weights.read(name, 0, tensor.numel()), tensor.reshape(-1)), name
    assert weights.read("a", 2, 3).tolist() == [2.0, 3.0, 4.0]


class TestFormats:
    def test_one_safetensors_file(self, tmp_path: Path) -> None:
        safetensors.torch.save_file(STATE, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text("{}")
        holds(opened(tmp_path), STATE)

    def test_several_with_an_index(self, tmp_path: Path) -> None:
        files = {
            "a": "one.safetensors",
            "b.c": "two.safetensors",
            "half": "two.safetensors",
            "scalar": "one.safetensors",
        }
        for file in set(files.values()):
            part = {name: tensor for name, tensor in STATE.items() if files[name] == file}
            safetensors.torch.save_file(part, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        holds(opened(tmp_path), STATE)
        (tmp_path / "two.safetensors").unlink()
        with pytest.raises(IntegrityError, match=r"names 'two\.safetensors', which is not in the folder"):
            opened(tmp_path)

    def test_several_without_an_index_are_not_guessed(self, tmp_path: Path) -> None:
        for file in ("one.safetensors", "two.safetensors"):
            safetensors.torch.save_file(STATE, tmp_path / file)
        with pytest.raises(UsageError, match="2 safetensors files and no index"):
            opened(tmp_path)

    def test_a_state_dict_of_torch(self, tmp_path: Path) -> None:
        torch.save(STATE, tmp_path / "pytorch_model.bin")
        holds(opened(tmp_path), STATE)

    @pytest.mark.parametrize("content", [b"", b"\xff" * 40, (10**9).to_bytes(8, "little") + b"{}"])
    def test_a_file_that_is_no_safetensors(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(IntegrityError):
            opened(tmp_path)

    def test_nothing_to_begin_from(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(UsageError, match="holds no weights that can be read"):
            opened(tmp_path)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm-was-done",)


class TestPickles:
    @pytest.mark.parametrize("allow_pickle", [False, True])
    def test_code_is_never_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_pickle: bool) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "latest").write_text("step")
        (tmp_path / "made" / "step").mkdir()
        torch.save({"module": Harm()}, tmp_path / "made" / "step" / "mp_rank_00_model_states.pt")
        with pytest.raises(UsageError, match="allow_pickle" if not allow_pickle else "more than tensors"):
            opened(tmp_path / "made", allow_pickle=allow_pickle)
        assert not (tmp_path / "harm-was-done").exists()

    def test_a_tag_does_not_lead_elsewhere(self, tmp_path: Path) -> None:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "latest").write_text("../other")
        (tmp_path / "other").mkdir()
        with pytest.raises(IntegrityError, match="not a folder there"):
            opened(tmp_path / "made", allow_pickle=True)


WANTED = {"a": (2, 3), "b": (4,), "cache": (9,)}
HERE = WeightsSettings("weights")


class TestNames:
    def test_a_shared_tensor_is_found_under_any_of_its_names(self) -> None:
        found = match_names(WANTED, {"tied": "b"}, ["cache"], {"a": (2, 3), "tied": (4,)}, HERE)
        assert found == {"a": "a", "b": "tied"}

    def test_missing_and_unexpected_are_named(self) -> None:
        with pytest.raises(ModelMismatch, match=r"it lacks 'b'.*it has 'c'") as raised:
            match_names(WANTED, {}, ["cache"], {"a": (2, 3), "c": (4,)}, HERE)
        assert "allow_missing" in str(raised.value)
        assert "allow_unexpected" in str(raised.value)

    def test_patterns_allow_them(self) -> None:
        settings = WeightsSettings("weights", ("b*",), ("c.*",))
        assert match_names(WANTED, {}, ["cache"], {"a": (2, 3), "c.d": (4,)}, settings) == {"a": "a"}

    def test_another_shape_is_never_allowed(self) -> None:
        with pytest.raises(ModelMismatch, match=r"'a' has shape \(3, 2\) in weights, the model's has \(2, 3\)"):
            match_names(WANTED, {}, ["cache"], {"a": (3, 2)}, WeightsSettings("weights", ("*",), ("*",)))


def test_settings_survive_json() -> None:
    settings = RunSettings("run", weights=WeightsSettings("weights", ("a", "b"), (), True))
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings

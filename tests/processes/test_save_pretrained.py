"""`save_pretrained` where no worker has all weights: the oracle is that of ZeRO stage 1, whose workers have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Outcome
from test_oracle import _assert_ended

from elastic.core.generation_spec import BatchSettings

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("peft", reason="the extra `hf` is not installed")
pytestmark = pytest.mark.processes

STEPS = 4


CLIPS = {"gradient_clipping": 1.0}


def of_stage(stage: int, **more: Any) -> dict[str, Any]:
    """In stage 3 small tensors are in parts, too."""
    parts = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"engine_config": {"zero_optimization": {"stage": stage, **parts}, **CLIPS}, **more}


FSDP2: dict[str, Any] = {"engine": "fsdp2", "engine_config": CLIPS}
ENGINES: list[dict[str, Any]] = [of_stage(3), FSDP2, {**FSDP2, "tp": 2}, of_stage(1, tp=2)]
NAMES = ["stage3", "fsdp2", "fsdp2-tp", "stage1-tp"]


def saved(crew: Crew, folder: Path, config: dict[str, Any], **engine: Any) -> list[Outcome]:
    config = {"how": "all", **config, "saves": str(folder), "url": str(folder.with_suffix(".run"))}
    batch = BatchSettings(global_batch=4, micro_batch=2, max_steps=None if "leaves at" in config else STEPS)
    return crew.run(range(2), "saving_scripts.saves", config, batch=batch, max_world_size=2, **engine)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (found,) = folder.glob("*.safetensors")
    return load_file(found)


@pytest.mark.parametrize("how", ["all", "given", "part"])
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_it_writes_whole_weights(crew: Crew, tmp_path: Path, engine: dict[str, Any], how: str) -> None:
    """Seen: empty tensors under ZeRO stage 3, slices with `tp`, without a word; and torch's error with FSDP2, at the
    end of transformers' run_clm_no_trainer."""
    import transformers

    for folder, given in (("one", of_stage(1)), ("parts", engine)):
        _assert_ended(saved(crew, tmp_path / folder, {"how": how}, **given), "finished", STEPS)
    exact, found = weights(tmp_path / "one"), weights(tmp_path / "parts")
    assert found.keys() == exact.keys()
    for name, values in exact.items():
        assert found[name].dtype == values.dtype
        assert torch.allclose(found[name], values, atol=1e-5), name
    assert weights(tmp_path / "parts" / "other").keys() == weights(tmp_path / "one" / "other").keys()
    if how == "all":
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")


@pytest.mark.parametrize("engine", ENGINES[:2], ids=NAMES[:2])
def test_adapters_are_written_whole(crew: Crew, tmp_path: Path, engine: dict[str, Any]) -> None:
    for folder, given in (("one", of_stage(1)), ("parts", engine)):
        _assert_ended(saved(crew, tmp_path / folder, {"lora": True}, **given), "finished", STEPS)
    exact, found = weights(tmp_path / "one"), weights(tmp_path / "parts")
    assert found.keys() == exact.keys()
    assert all("lora" in name for name in exact)
    for name, values in exact.items():
        assert torch.allclose(found[name], values, atol=1e-5), name


def test_a_loop_that_was_left_early_is_left_by_all_before(crew: Crew, tmp_path: Path) -> None:
    done = saved(crew, tmp_path / "parts", {"leaves at": 3}, **ENGINES[0])
    _assert_ended(done, "finished", 3)
    assert weights(tmp_path / "parts")["model.norm.weight"].shape == (16,)


REFUSED = [
    (
        "first",
        "the weights are on several workers, which gather them all together. Call it on all of them with is_main",
    ),
    ("around", "the model holds the one that is trained: give it state_dict="),
]


@pytest.mark.parametrize(("how", "words"), REFUSED)
def test_what_would_wait_for_the_others_or_be_empty_is_refused(
    crew: Crew, tmp_path: Path, how: str, words: str
) -> None:
    """By rank 0 alone, without a word of which worker writes. Seen: empty tensors."""
    for outcome in saved(crew, tmp_path / "parts", {"how": how}, **ENGINES[0]):
        if outcome.result.kind != "finished":
            assert outcome.result.kind in ("usage_error", "collective_failed", "ended")
            if outcome.result.kind == "usage_error":
                assert words in outcome.result.message
                break
    else:
        pytest.fail("it was not refused")
    assert not (tmp_path / "parts" / "model.safetensors").exists()


def test_other_workers_files_are_named(crew: Crew, tmp_path: Path) -> None:
    """`is_main_process` of one worker for each node: rank 0 alone has the weights."""
    _assert_ended(saved(crew, tmp_path / "parts", {"how": "nodes"}, **ENGINES[1]), "finished", STEPS)
    assert weights(tmp_path / "parts")["model.norm.weight"].shape == (16,)

"""transformers' Trainer where ranks share each layer, or experts: the oracle is one rank that has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Outcome
from safetensors.torch import load_file
from test_library_trainers import BY_PASS
from test_oracle import _assert_ended
from test_trainer_in_loop import TRAINS, engine_of, entries

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
pytestmark = pytest.mark.processes

LIBRARY = "library_trainers.trains"
# Four batches, of which all that read others have as many.
EVALUATES = 32
LLAMA: dict[str, Any] = {"family": "Llama", "model": {"tie_word_embeddings": True}}
MIXTRAL: dict[str, Any] = {"family": "Mixtral", "model": {"num_local_experts": 4, "num_experts_per_tok": 2}}
SEQUENCES: dict[str, Any] = {"family": "Llama", "model": {"attn_implementation": "elastic"}}
GPT2: dict[str, Any] = {"family": "GPT2", "model": {"resid_pdrop": 0.1}}


def through_cells(
    crew: Crew,
    folder: Path,
    config: dict[str, Any],
    shared: dict[str, Any],
    whole: dict[str, Any],
    last: int,
    trains: str = TRAINS,
    of_two: dict[str, Any] | None = None,
) -> tuple[list[Outcome], Outcome]:
    """Two cells of two, one, and two again; and one rank by itself. Nobody was called again. `of_two`: what the second
    generation has of its own."""
    more: dict[str, Any] = {"batch": BatchSettings(), "checkpoint_every_steps": 1}
    config = {**config, "in_loop": True, "victim": 0, "evaluates": EVALUATES, "saves": True}
    moved = {**config, "url": str(folder / "moved")}
    store = CheckpointStore(str(folder / "moved"), "run")
    shared = {**more, **shared, "max_world_size": 4}
    _assert_ended(crew.run([0, 1, 2, 3], trains, moved, end_at=3, **shared), "ended", 3)
    fewer = crew.run([2, 0], trains, moved, end_at=6, checkpoint=store.list()[0].id, **{**shared, **(of_two or {})})
    _assert_ended(fewer, "ended", 6)
    grown = crew.run([2, 0, 1, 3], trains, moved, checkpoint=store.list()[0].id, **shared)
    _assert_ended(grown, "finished", last)
    left = [point for member in crew.members for point in member.points if point.startswith("left")]
    # Two stand by over an epoch's end, and make their Trainers again, which may take a second.
    assert [point for point in left if "it has stood by" not in point and "its set-up has taken" not in point] == []

    # As many samples to a step as those that read others have together.
    readers = 4 // (shared.get("tp", 1) * shared.get("sp", 1))
    quiet = {**config, "accumulates": 2 * readers, "url": str(folder / "still")}
    (still,) = crew.run([0], trains, quiet, **{**more, **whole, "max_world_size": 1})
    _assert_ended([still], "finished", last)
    return grown, still


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize(("stage", "model"), [(None, LLAMA), (None, GPT2), (1, LLAMA), (3, LLAMA)])
def test_workers_that_share_layers_log_evaluate_and_save_what_one_does(
    crew: Crew, tmp_path: Path, stage: int | None, model: dict[str, Any], best: bool
) -> None:
    grown, still = through_cells(
        crew, tmp_path, {"model": model, "best": best}, {**engine_of(stage), "tp": 2}, engine_of(stage), last=14
    )
    assert_alike(grown, still, tmp_path, best)
    if stage != 3:
        # transformers counts no parameter that is partitioned at that moment.
        counted, wanted = (
            max(entry.get("total_flos", 0.0) for entry in each.told["log"]) for each in (grown[0], still)
        )
        assert counted == pytest.approx(wanted, rel=1e-6)


def test_an_optimizer_of_whole_tensors_is_made_of_the_model(crew: Crew, tmp_path: Path) -> None:
    config = {"model": LLAMA, "best": False, "optimizer": "orthogonal"}
    grown, still = through_cells(crew, tmp_path, config, {**engine_of(None), "tp": 2}, engine_of(None), last=14)
    assert_alike(grown, still, tmp_path, best=False)


@pytest.mark.parametrize("stage", [3, None])
def test_what_modules_keep_beside_tensors_is_saved_with_gathered_weights(
    crew: Crew, tmp_path: Path, stage: int | None
) -> None:
    config = {"in_loop": True, "victim": 0, "counts": True, "saves": True, "url": str(tmp_path)}
    done = crew.run([0, 1], TRAINS, config, batch=BatchSettings(max_steps=2), max_world_size=2, **engine_of(stage))
    _assert_ended(done, "finished", 2)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["transformer.ln_f._extra_state"].tolist() == [3.0]


@pytest.mark.parametrize("stage", [1, None])
def test_another_number_of_workers_may_share_layers_in_each_generation(
    crew: Crew, tmp_path: Path, stage: int | None
) -> None:
    engine, config = engine_of(stage), {"model": LLAMA, "best": True}
    batch = {"batch": BatchSettings(global_batch=8, micro_batch=2)}
    shared = {**engine, **batch, "tp": 2, "tp_sizes": (1, 2)}
    grown, still = through_cells(crew, tmp_path, config, shared, {**engine, **batch}, 14, of_two={"tp": 1})
    assert_alike(grown, still, tmp_path, True)


@pytest.mark.parametrize("best", [False, True])
def test_workers_that_share_experts_log_evaluate_and_save_what_one_does(crew: Crew, tmp_path: Path, best: bool) -> None:
    engine = {"engine": "fsdp2"}
    config = {"model": MIXTRAL, "best": best}
    grown, still = through_cells(crew, tmp_path, config, {**engine, "ep": 2}, engine, last=7)
    assert_alike(grown, still, tmp_path, best)


@pytest.mark.parametrize(("stage", "tied"), [(None, False), (None, True), (2, True)])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trainers_of_trl_where_workers_share_layers(
    crew: Crew, tmp_path: Path, kind: str, stage: int | None, tied: bool
) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    engine, config = engine_of(stage), {"kind": kind, "lora": False, "tied": tied}
    grown, still = through_cells(crew, tmp_path, config, {**engine, "tp": 2}, engine, 14, LIBRARY)
    assert_alike(grown, still, tmp_path, False)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {}),
        (3, {"length": 7, "metrics": True}),
        (None, {"length": 7}),
        (None, {"metrics": True, "best": True}),
    ],
)
def test_workers_that_share_sequences_log_evaluate_and_save_what_one_does(
    crew: Crew, tmp_path: Path, stage: int | None, more: dict[str, Any]
) -> None:
    """Sequences of seven tokens are filled up to eight."""
    engine, config = engine_of(stage), {"model": SEQUENCES, **more}
    grown, still = through_cells(crew, tmp_path, config, {**engine, "sp": 2}, engine, 14)
    assert_alike(grown, still, tmp_path, bool(more.get("best")))
    shared = [use.axis for outcome in grown for report in outcome.reports for use in report.collectives]
    assert "sp" in shared


def test_adapters_on_shared_layers_are_saved_whole(crew: Crew, tmp_path: Path) -> None:
    """The first evaluated are the best. What is dropped before the adapters is drawn alike in a cell."""
    pytest.importorskip("trl", reason="trl is not installed")
    engine, config = engine_of(None), {"kind": "SFT", "lora": True}
    grown, still = through_cells(crew, tmp_path, config, {**engine, "tp": 2}, engine, 14, LIBRARY)
    assert [outcome.told["best"] for outcome in grown] == pytest.approx([still.told["best"]] * 4, rel=1e-4)
    assert_alike(grown, still, tmp_path, True, "adapter_model")


@pytest.mark.parametrize(
    ("trains", "config", "more", "said"),
    [
        (LIBRARY, {"kind": "SFT", "lora": False}, {"tp": 2}, "TRL multiplies by lm_head.weight itself"),
        (TRAINS, {"model": MIXTRAL}, {"ep": 2, **engine_of(1)}, "gives the experts other names"),
        (TRAINS, {}, {"pp": 2, "engine": "fsdp2"}, "which the last stage alone has"),
        (TRAINS, {"each node": True}, engine_of(3), "save_on_each_node is not supported where no worker has the whole"),
        (TRAINS, {"model": SEQUENCES, "smoothing": 0.1}, {"sp": 2}, "label_smoothing_factor is of whole sequences"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(
    crew: Crew, tmp_path: Path, trains: str, config: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    given = {**config, "in_loop": True, "victim": 0, "url": str(tmp_path)}
    for outcome in crew.run([0, 1], trains, given, batch=BatchSettings(), max_world_size=2, **more):
        assert outcome.result.kind == "usage_error"
        assert said in outcome.result.message


def assert_alike(grown: list[Outcome], still: Outcome, tmp_path: Path, best: bool, file: str = "model") -> None:
    wanted = entries(still)
    for outcome in grown:
        assert outcome.told["steps"] == still.told["steps"]
    assert len(entries(grown[0])) == len(wanted) > 4
    for one, other in zip(entries(grown[0]), wanted, strict=True):
        named = {key: value for key, value in other.items() if not any(part in key for part in BY_PASS)}
        assert {key: one[key] for key in named} == pytest.approx(named, rel=1e-4)
    saved, other = (load_file(tmp_path / folder / f"{file}.safetensors") for folder in ("moved", "still"))
    assert saved.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)
    if not best:
        from transformers import AutoModelForCausalLM

        elastic.export(f"{tmp_path / 'moved'}/run", tmp_path / "hf", to="hf")
        last, exported = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("moved", "hf"))
        for name, value in exported.state_dict().items():
            assert torch.equal(last.state_dict()[name], value), name

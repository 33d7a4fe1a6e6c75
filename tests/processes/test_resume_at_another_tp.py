"""Runs that are resumed with another number of ranks that share each layer, or none: the oracle is one rank with whole
layers, undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import pytest
from cells import LAST_STEP, WHOLE, Run, assert_every_sample_once
from crew import Crew, Outcome
from test_oracle import _assert_ended, _distance
from test_tensor_parallel import ALLOWED

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.lanes import CUTS
from elastic.core.checkpoint.manifest_json import to_json

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
# Of weights that are rounded to bf16 in each step.
ROUNDED = 5e-2
# Members of one generation, its last step (None: the end), the mesh, and what else is new.
Part = tuple[Sequence[int], int | None, dict[str, int], dict[str, Any]]
NONE, TWO, THREE, FOUR = ({"tp": size} for size in (1, 2, 3, 4))
THERE_AND_BACK: list[Part] = [((0, 1, 2, 3), 2, TWO, {}), ((2, 0), 4, NONE, {}), ((1, 3, 0, 2), None, TWO, {})]
# Three heads of keys and values: two on one worker, one on the other.
UNEVEN = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 25}
BIASED, TIED = {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}
LLAMA: dict[str, Any] = {"family": "Llama"}


def through(crew: Crew, url: Path, function: str, config: dict[str, Any], parts: Sequence[Part]) -> Run:
    store, generations, checkpoint = CheckpointStore(str(url), "run"), list[list[Outcome]](), None
    for who, end_at, mesh, more in parts:
        given = {**config, **more, "url": str(url)}
        outcomes = crew.run(who, function, given, end_at=end_at, checkpoint=checkpoint, **mesh, **cells.of_run(config))
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        checkpoint = store.list()[0].id
        generations.append(outcomes)
    return Run(url, generations, parts[-1][2]["tp"])


def compare(crew: Crew, url: Path, function: str, config: dict[str, Any], parts: Sequence[Part]) -> None:
    whole = Run(url / "whole", cells.through(crew, url / "whole", function, config, WHOLE), 1)
    moved = through(crew, url / "moved", function, config, parts)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        pytest.param({"stage": 0}, THERE_AND_BACK, id="stage0", marks=SLOW),
        # Four heads over three ranks, and 21 columns over two, three and four.
        pytest.param(
            {"stage": 1, "dropout": 0.2},
            [*THERE_AND_BACK[:2], ((1, 3, 0), 6, THREE, {}), ((0, 1, 2, 3), None, FOUR, {"stage": 3})],
            id="stage1-3-uneven",
        ),
        pytest.param({"stage": 2}, [*THERE_AND_BACK[1:2], ((0, 3, 1, 2), None, FOUR, {})], id="stage2-from-none"),
        pytest.param({"stage": 3}, [((1, 0), 3, TWO, {}), ((0,), None, NONE, {"stage": 1})], id="stage3-to-1"),
        # No layer's slices have dropout in them: it is drawn alike on all ranks of a cell.
        pytest.param({"engine": "fsdp2", "dropout": 0.2}, THERE_AND_BACK, id="fsdp2-tied-dropout"),
        pytest.param(
            {"engine": "fsdp2"},
            [((0, 1), 3, TWO, {}), ((2, 0, 3, 1), None, NONE, {"fsdp2": {"shard_workers": 2}})],
            id="fsdp2-to-copies",
        ),
    ],
)
def test_a_run_goes_on_with_other_slices(
    crew: Crew, tmp_path: Path, config: dict[str, Any], parts: Sequence[Part]
) -> None:
    compare(crew, tmp_path, "tensor_parallel.train", config, parts)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        pytest.param(
            {"stage": 1, "model": UNEVEN | BIASED},
            [((0, 1, 2, 3), 3, TWO, {}), ((2, 0, 1), 5, THREE, {}), ((1, 0), None, NONE, {})],
            id="stage1-uneven-biases",
        ),
        pytest.param(
            {"engine": "fsdp2", "model": TIED | BIASED | {"num_key_value_heads": 4}},
            [((0, 1, 2, 3), 3, TWO, {}), ((2, 0, 1, 3), 6, FOUR, {}), ((1, 0), None, TWO, {})],
            id="fsdp2-tied-biases",
        ),
    ],
)
def test_a_model_of_transformers_goes_on_with_other_slices(
    crew: Crew, tmp_path: Path, config: dict[str, Any], parts: Sequence[Part]
) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    compare(crew, tmp_path, "hugging_face.train", LLAMA | config, parts)


@pytest.mark.parametrize("within", [pytest.param(False, id="resumed", marks=SLOW), pytest.param(True, id="within")])
def test_stages_go_on_with_other_slices(crew: Crew, tmp_path: Path, within: bool) -> None:
    """Tied parameters lie in two stages, and each stage knows its own cuts. Also `within` a run."""
    config = {"engine": "fsdp2", "tied": True, "plan": "all", "clipping": 0.3, "dropout": 0.2, "in_loop": within}
    parts: list[Part] = [
        ((0, 1, 2, 3), 3, {"tp": 2, "pp": 2}, {}),
        ((3, 1), 5, {"tp": 1, "pp": 2}, {}),
        ((3, 1, 2, 0), None, {"tp": 2, "pp": 1}, {}),
    ]
    compare(crew, tmp_path, "staged.train", config, parts)


@pytest.mark.slow
def test_bf16_is_within_its_rounding(crew: Crew, tmp_path: Path) -> None:
    """Masters and moments are in fp32, and what computes is made of them anew."""
    config = {"stage": 2, "dtype": "bf16"}
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", "tensor_parallel.train", config, WHOLE), 1)
    parts: list[Part] = [((0, 1), 3, TWO, {}), ((2, 0), 5, NONE, {"stage": 3}), ((0, 1, 2), None, THREE, {})]
    moved = through(crew, tmp_path / "moved", "tensor_parallel.train", config, parts)
    assert _distance(whole.losses, moved.losses) <= ROUNDED
    assert_every_sample_once(moved)


def test_damage_and_slices_of_an_older_release_are_refused_in_one_sentence(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1}
    through(crew, tmp_path, "tensor_parallel.train", config, [((0, 1, 2, 3), 3, TWO, {})])
    store = CheckpointStore(str(tmp_path), "run")
    newest = store.list()[0].id
    given = {**config, "url": str(tmp_path)}
    # More than one tensor: of what every rank had whole, this one's copy is not read.
    (shard,) = tmp_path.rglob(f"*{newest}*/rank-00003-of-00004.safetensors")
    data = bytearray(shard.read_bytes())
    for at in range(len(data) // 2, len(data)):
        data[at] ^= 1
    shard.write_bytes(data)
    outcomes = crew.run([0, 1, 2], "tensor_parallel.train", given, checkpoint=newest, tp=3, **cells.of_run(config))
    assert {outcome.result.kind for outcome in outcomes} == {"restore_failed"}, outcomes[0].result
    assert all("is not what was written" in outcome.result.message for outcome in outcomes)
    manifest = store.manifest(newest)
    extra = {key: value for key, value in manifest.extra_state.items() if key != CUTS}
    (file,) = tmp_path.rglob(f"*{newest}*/manifest.json")
    file.write_text(to_json(replace(manifest, extra_state=extra)))
    outcomes = crew.run([0], "tensor_parallel.train", given, checkpoint=newest, tp=1, **cells.of_run(config))
    assert outcomes[0].result.kind == "usage_error", outcomes[0].result
    assert "was written by an older release: resume the run with the same mesh.tp" in outcomes[0].result.message

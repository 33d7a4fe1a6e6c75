"""Models of transformers in stages of their layers, each calling the model's own forward, through other numbers of
stages and a lost rank. The oracle is one rank that trains as a script of transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
from cells import AT, WHOLE, Run, assert_every_sample_once
from crew import Crew
from test_huggingface import EPS, TIED, through
from test_oracle import _distance

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

pytestmark = pytest.mark.processes
SLOW = pytest.mark.slow

ALLOWED = 1e-5
# Members, number of stages, last step.
STAGES: Sequence[tuple[Sequence[int], int, int | None]] = (
    ((0, 1, 2, 3), 2, 3),
    ((2, 0), 2, 5),
    ((1, 3, 0, 2), 4, None),
)
SDPA = {"attn_implementation": "sdpa"}
FOUR = {"num_hidden_layers": 4}
STAGED: dict[str, Any] = {"engine": "fsdp2", "in_loop": True, "model": FOUR}


def through_stages(crew: Crew, url: Path, config: Mapping[str, Any], parts: Any = STAGES, **spec: Any) -> Run:
    parts = [(who, end_at, {"pp": pp}) for who, pp, end_at in parts]
    return through(crew, url, config, parts, "train_in_stages", **spec)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"family": "Llama", "ragged": True}, id="llama"),
        # The gradient of its keys' bias is rounding.
        pytest.param({"family": "GPT2", "model": {"n_layer": 4}, "eps": EPS}, id="gpt2"),
        pytest.param({"family": "Mistral", "model": {**FOUR, "sliding_window": 3}}, id="mistral", marks=SLOW),
        pytest.param({"family": "Gemma", "model": {**FOUR, "head_dim": 4}}, id="gemma", marks=SLOW),
        pytest.param(
            {"family": "Granite", "model": {**FOUR, "embedding_multiplier": 3.0, "logits_scaling": 2.0}}, id="granite"
        ),
        pytest.param({"family": "Llama", "model": {**FOUR, **TIED}, "recomputed": True}, id="recomputed", marks=SLOW),
        pytest.param({"family": "Llama", "deferred": True}, id="deferred"),
        pytest.param({"family": "Llama", "compiled": "blocks"}, id="compiled"),
        pytest.param({"family": "Llama", "compiled": "wrapped blocks"}, id="compiled-wrapped", marks=SLOW),
        pytest.param({"family": "Llama", "adapters": True}, id="adapters"),
    ],
)
def test_models_in_stages_by_their_own_forward_equal_one_rank(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    config = {**STAGED, **config}
    # What is drawn on the meta device is drawn in another order.
    whole = through(crew, tmp_path / "whole", config, WHOLE, "train_in_stages" if "deferred" in config else "train")
    moved = through_stages(crew, tmp_path / "moved", config)
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= ALLOWED
    assert_every_sample_once(moved)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        pytest.param({"family": "Llama"}, {"tp": 2}, id="tp"),
        pytest.param({"family": "Llama", "ragged": True, "sequences": True}, {"sp": 2}, id="sp"),
        pytest.param({"family": "Mixtral", "eps": EPS}, {"ep": 2}, id="ep"),
    ],
)
def test_models_in_stages_that_share_more_equal_one_rank(
    crew: Crew, tmp_path: Path, config: dict[str, Any], axes: dict[str, int]
) -> None:
    config = {**STAGED, **config, "model": {**FOUR, **config.get("model", {})}}
    if "sequences" in config:
        config["model"]["attn_implementation"] = "elastic"
    whole = through(crew, tmp_path / "whole", {**config, "model": {**config["model"], **SDPA}}, WHOLE)
    parts = (((0, 1, 2, 3), 2, 3), ((2, 0), 1, 5), ((1, 3, 0, 2), 2, None))
    moved = through_stages(crew, tmp_path / "moved", config, parts, **axes)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)


@pytest.mark.parametrize(
    "schedule", ["1F1B", *(pytest.param(name, marks=SLOW) for name in ("Interleaved1F1B", "DualPipeV"))]
)
def test_a_rank_that_is_lost_within_a_models_own_forward(crew: Crew, tmp_path: Path, schedule: str) -> None:
    options = {"pipeline_schedule": schedule, "reshard_after_forward": schedule != "DualPipeV"}
    config = {**STAGED, "family": "Llama", "ragged": True, "fsdp2": options}
    whole = through(crew, tmp_path / "whole", config, WHOLE, "train_in_stages")
    killed = cells.with_a_rank_killed(
        crew, tmp_path / "killed", "hugging_face.train_in_stages", config, "forward", pp=2
    )
    run = Run(tmp_path / "killed", killed)
    assert _distance(whole.after(AT + 2), run.after(AT + 2)) <= ALLOWED
    assert _distance(whole.state(), run.state()) <= ALLOWED
    (one,) = whole.outcomes
    for outcome in killed[-1]:
        assert outcome.told["evaluated"] == pytest.approx(one.told["evaluated"], abs=ALLOWED)

"""DeepSpeed's own Muon at every stage, mesh and world size; the oracle is one rank, and that one's is plain torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import test_expert_parallel
import test_native_moe
import test_pipeline
import test_sequence
import torch
from cells import LAST_STEP, MOVED, WHOLE, Run, with_a_rank_killed
from crew import Crew
from layered_model import Transformer
from test_oracle import _distance
from test_tensor_parallel import ALLOWED
from test_whole_optimizers import plain_torch

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
TRAIN = "tensor_parallel.train"
# Above the rounding of gradients that are zero, those of a key's bias, which Adam would divide by itself.
EPS = 1e-4
# On a CPU its method "gram" computes in fp32, "standard" in bf16.
MATRICES = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "ns_method": "gram"}
# DeepSpeed's own kernel would be compiled first, which takes minutes.
PARAMS = {**MATRICES, "adam_lr": 0.01, "eps": EPS, "torch_adam": True}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
HOST = {"offload_optimizer": {"device": "cpu"}}
SPLIT = [((0, 1, 2, 3), 2, 3), ((2, 0), 2, 5), ((1, 3, 0, 2), 2, None)]


def of_stage(stage: int, params: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    # DeepSpeed's stage 3 wants it so. Its ZeRO clips what Muon gives, whose norm is far above that of the gradients.
    zero = {"reduce_scatter": False} if stage == 3 else {}
    top = {"optimizer": {"type": "Muon", "params": {**PARAMS, **(params or {})}}, **more.pop("top", {})}
    zero |= more.pop("zero", {})
    return {"stage": stage, "layers": False, "clipping": 0.0, "top": top, "zero": zero, **more}


def through(crew: Crew, url: Path, config: Mapping[str, Any], parts: Any, **spec: Any) -> Run:
    return Run(url, cells.through(crew, url, TRAIN, config, parts, **spec), spec.get("tp", 1))


def assert_equal(one: Any, other: Any) -> None:
    assert _distance(one.losses, other.losses) <= ALLOWED
    here, there = (run.state() if callable(run.state) else run.state for run in (one, other))
    assert _distance(here, there) <= ALLOWED


# Of torch's compiler, which DeepSpeed's module imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path, stage: int) -> None:
    """What the oracle below is worth."""
    (outcome,) = (whole := through(crew, tmp_path, of_stage(stage, schedule=False), WHOLE)).outcomes
    torch.manual_seed(3)
    model = Transformer(0.0, False)
    losses, weights = plain_torch(model, outcome.indices, lambda trained: _for_one_device(model, trained), 1e9)
    found = [float(whole.losses[f"loss {step}"]) for step in range(1, LAST_STEP + 1)]
    assert losses == pytest.approx(found, abs=1e-6)
    state = whole.state()
    for key in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
        assert torch.allclose(state[f"master/{key}"].float(), weights[key].flatten(), atol=ALLOWED), key


def _for_one_device(model: Transformer, trained: Sequence[Any]) -> torch.optim.Optimizer:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    embeddings = {id(p) for name, p in model.named_parameters() if "embed" in name}
    matrices = [p for p in trained if p.dim() > 1 and id(p) not in embeddings]
    chosen = {id(p) for p in matrices}
    muon = {**MATRICES, "use_muon": True}
    adam = {"lr": 0.01, "eps": EPS, "betas": (0.9, 0.95), "weight_decay": 0.01, "use_muon": False}
    rest = [p for p in trained if id(p) not in chosen]
    torch.compiler.set_stance("force_eager")
    made: Any = SingleDeviceMuonWithAuxAdam([{"params": matrices, **muon}, {"params": rest, **adam}])
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(of_stage(stage), id=f"stage{stage}") for stage in (0, 1, 2, 3)),
        pytest.param(of_stage(1, zero={"round_robin_gradients": True}, clipping=0.5), id="stage1-round-robin-clipping"),
        pytest.param(of_stage(2, zero={"parameter_alignment": True}), id="stage2-aligned"),
        *(pytest.param(of_stage(s, zero=HOST), id=f"stage{s}-offload", marks=SLOW) for s in (1, 2)),
        pytest.param(of_stage(1, compiled=True), id="stage1-compiled", marks=SLOW),
        pytest.param(of_stage(2, {"torch_adam": False}), id="stage2-kernel", marks=SLOW),
    ],
)
def test_every_world_size_is_one_rank(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, MOVED)
    assert_equal(whole, moved)
    cells.assert_every_sample_once(moved)
    assert cells.left(crew) <= {cells.STOOD_BY}


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(of_stage(stage, dtype="bf16", clipping=0.5), id=f"stage{stage}-bf16") for stage in (1, 2, 3)),
        # There DeepSpeed has another optimizer of its own.
        pytest.param(of_stage(1, dtype="bf16", clipping=0.5, top=SUMS), id="stage1-bf16-sums-in-fp32"),
        *(pytest.param(of_stage(s, dtype="fp16", clipping=0.5), id=f"stage{s}-fp16", marks=SLOW) for s in (1, 2, 3)),
    ],
)
def test_half_precision_is_as_far_from_one_rank_as_its_rounding(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    exact = through(crew, tmp_path / "exact", of_stage(config["stage"], clipping=0.5), WHOLE)
    still = through(crew, tmp_path / "still", config, WHOLE)
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, MOVED)
    cells.assert_within_rounding(exact, still, moved)


@pytest.mark.parametrize(
    ("stage", "where"), [(1, "step"), (2, "backward"), (3, "step"), pytest.param(1, "backward", marks=SLOW)]
)
def test_survivors_of_a_killed_rank_stay_in_their_loop(crew: Crew, tmp_path: Path, stage: int, where: str) -> None:
    config = of_stage(stage)
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    moved = Run(tmp_path / "moved", with_a_rank_killed(crew, tmp_path / "moved", TRAIN, config, where))
    assert _distance(whole.after(cells.AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= ALLOWED


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=SLOW) for stage in (0, 2, 3))])
def test_slices_are_stepped_alike_at_every_number_of_cells(crew: Crew, tmp_path: Path, stage: int) -> None:
    """Each slice is a matrix of its own to DeepSpeed: the oracle is one cell."""
    config = of_stage(stage, layers=True)
    shapes = through(crew, tmp_path / "one", config, WHOLE).shapes[0]
    whole = through(crew, tmp_path / "whole", config, [((0, 1), None)], tp=2)
    moved = through(crew, tmp_path / "moved", {**config, "in_loop": True}, MOVED, tp=2)
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(shapes), moved.state(shapes)) <= ALLOWED


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=SLOW) for stage in (0, 2, 3))])
def test_shared_experts_are_stepped_as_one_ranks(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = of_stage(stage)
    whole = test_expert_parallel.through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    assert_equal(whole, test_expert_parallel.through(crew, tmp_path / "moved", config, SPLIT))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2])
def test_experts_of_deepspeeds_own_layers_are_stepped_as_one_ranks(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = of_stage(stage)
    whole = test_native_moe.through(crew, tmp_path / "whole", config, [((0,), 1, None)])
    assert_equal(whole, test_native_moe.through(crew, tmp_path / "moved", config, SPLIT))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1])
def test_stages_of_a_pipeline_are_stepped_as_one_ranks(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = of_stage(stage, tied=True)
    one = test_pipeline.through(crew, tmp_path / "one", config, WHOLE)
    assert_equal(one, test_pipeline.through(crew, tmp_path / "moved", {**config, "in_loop": True}, MOVED, pp=2))


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=SLOW) for stage in (0, 2, 3))])
def test_shared_sequences_are_stepped_as_one_ranks(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = of_stage(stage)
    one = test_sequence.through(crew, tmp_path / "one", config, WHOLE, sp=1)
    assert_equal(one, test_sequence.through(crew, tmp_path / "moved", {**config, "in_loop": True}, MOVED))


@pytest.mark.parametrize(
    ("config", "spec", "refusal"),
    [
        (of_stage(1, layers=True), {"tp_sizes": (1, 2)}, "Muon .* each slice"),
        (of_stage(0, {"per_head_muon": True}), {}, "per_head_muon"),
        (of_stage(1, {"per_head_muon": True}, zero={"parameter_alignment": True}), {}, "per_head_muon"),
        (of_stage(1, {"per_head_muon": True}, dtype="bf16", top=SUMS), {}, "per_head_muon"),
        (of_stage(3, zero={"save_muon_momentum_buffer_in_memory": True}), {}, "save_muon_momentum_buffer_in_memory"),
    ],
    ids=["several-tp", "heads-stage0", "heads-aligned", "heads-sums-in-fp32", "momentum-in-memory"],
)
def test_what_would_depend_on_the_mesh_is_refused(
    crew: Crew, tmp_path: Path, config: dict[str, Any], spec: dict[str, Any], refusal: str
) -> None:
    config = {**config, "url": str(tmp_path)}
    (outcome,) = crew.run([0], TRAIN, config, **{**cells.of_run(config), **spec})
    assert outcome.result.kind == "usage_error"
    assert re.search(refusal, outcome.result.message), outcome.result.message

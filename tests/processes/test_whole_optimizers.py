"""Optimizers that look at whole tensors, by the fsdp2 engine: every mesh is one rank that has everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import optimizers
import pytest
import test_fsdp2_experts as experts
import torch
from cells import LAST_STEP, MOVED, WHOLE, Run, with_a_rank_killed
from crew import Crew
from layered_model import EVEN, Transformer, loss_of, text
from test_fsdp2_pipeline import through_stages
from test_oracle import _distance
from test_tensor_parallel import ALLOWED

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
FSDP2: dict[str, Any] = {"engine": "fsdp2", "clipping": 0.3}
# Muon computes in bf16: a gradient's last bit is the last of a bf16 now and then, a 256th of an update.
COARSE = 2e-2


def _ends(one: Run, other: Run, allowed: float) -> None:
    assert _distance(one.losses, other.losses) <= allowed
    assert _distance(one.state(), other.state(one.shapes[0])) <= allowed
    cells.assert_every_sample_once(other)


@pytest.mark.parametrize("name", ["orthogonal", "muon", "factored", "adafactor"])
def test_one_rank_equals_plain_torch(crew: Crew, tmp_path: Path, name: str) -> None:
    """What the oracle below is worth."""
    config = {**FSDP2, "optimizer": name, "schedule": False}
    whole = Run(tmp_path, cells.through(crew, tmp_path, "tensor_parallel.train", config, WHOLE))
    (outcome,) = whole.outcomes
    torch.manual_seed(3)
    model = Transformer(0.0, False, **EVEN)
    losses, weights = plain_torch(model, outcome.indices, lambda trained: optimizers.of({"optimizer": name}, trained))
    # Losses are about ten with transformers' Adafactor.
    allowed = {"muon": COARSE, "adafactor": 1e-5}.get(name, 1e-6)
    found = [float(whole.losses[f"loss {step}"]) for step in range(1, LAST_STEP + 1)]
    assert losses == pytest.approx(found, abs=allowed)
    for key, value in weights.items():
        assert torch.allclose(outcome.told["weights"][key], value, atol=max(allowed, ALLOWED)), key


def plain_torch(
    model: Transformer, indices: Sequence[int], make: Callable[[list[Any]], Any], clipping: float = FSDP2["clipping"]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses by step, and the weights at the end. `make` gives an optimizer, or several."""
    losses: list[float] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = make(trained)
    for begin in range(0, len(indices), 10):
        step = indices[begin : begin + 10]
        losses.append(0.0)
        for first in range(0, len(step), 2):
            samples = [text(index) for index in step[first : first + 2]]
            tokens, labels = (torch.stack(part) for part in zip(*samples, strict=True))
            loss = loss_of(model(tokens), labels) * len(samples) / len(step)
            loss.backward()
            losses[-1] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, clipping)
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.step()
        model.zero_grad()
    return losses, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["orthogonal", "muon", "factored", pytest.param("adafactor", marks=SLOW)])
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        pytest.param({}, {}, id="fsdp2"),
        pytest.param({}, {"tp": 2}, id="tp"),
        pytest.param({"small rounds": True}, {"tp": 2}, id="tp-rounds", marks=SLOW),
        pytest.param({"shard_workers": 2}, {}, id="copies"),
        pytest.param({"cpu_offload": True}, {}, id="offload", marks=SLOW),
    ],
)
def test_every_world_size_is_one_rank(
    crew: Crew, tmp_path: Path, name: str, options: Mapping[str, Any], mesh: Mapping[str, int]
) -> None:
    config = {**FSDP2, "optimizer": name}
    function, allowed = "tensor_parallel.train", COARSE if name == "muon" else ALLOWED
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", function, config, WHOLE))
    config |= {"small rounds": options.get("small rounds"), "in_loop": True}
    config["fsdp2"] = {key: value for key, value in options.items() if key != "small rounds"}
    run = cells.through(crew, tmp_path / "moved", function, config, MOVED, **mesh)
    _ends(whole, Run(tmp_path / "moved", run, mesh.get("tp", 1)), allowed)
    assert cells.left(crew) <= {cells.STOOD_BY}


@pytest.mark.parametrize("name", ["orthogonal", "factored"])
@pytest.mark.parametrize("mesh", [{}, pytest.param({"tp": 2}, marks=SLOW)], ids=["ep", "ep-tp"])
def test_shared_experts_are_stepped_as_wholes(
    crew: Crew, eight: Crew, tmp_path: Path, mesh: Mapping[str, int], name: str
) -> None:
    config = {**experts.DOUBLE, "optimizer": name}
    whole = experts.through(crew, tmp_path / "whole", config, WHOLE)
    parts: Sequence[Any] = MOVED if not mesh else ((range(8), 3), ((5, 0, 6, 3), 5), ((1, 7, 0, 2, 6, 5, 3, 4), None))
    config["in_loop"] = True
    moved = experts.through(eight if mesh else crew, tmp_path / "moved", config, parts, ep=2, **mesh)
    experts.assert_equal(whole, moved)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=SLOW)])
def test_each_stage_of_a_pipeline_steps_its_own(crew: Crew, eight: Crew, tmp_path: Path, tp: int) -> None:
    config = {**FSDP2, "optimizer": "orthogonal", "tied": True}
    whole = through_stages(crew, tmp_path / "whole", config, (((0,), 1, None),))
    parts: Sequence[Any] = ((range(4), 2, 3), ((2, 0), 2, 5), (range(4), 4, None))
    if tp == 2:
        parts, config = ((range(8), 2, 3), ((5, 0, 6, 3), 2, 5), (range(8), 2, None)), {**config, "plan": True}
    moved = through_stages(crew if tp == 1 else eight, tmp_path / "moved", config, parts, tp=tp)
    _ends(whole, moved, ALLOWED)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("backward", "marked"),
        ("step", "written on"),
        ("step", "factored"),
        pytest.param("step", "marked", marks=SLOW),
        pytest.param("backward", "factored", marks=SLOW),
    ],
)
def test_survivors_of_a_killed_rank_stay_in_their_loop(crew: Crew, tmp_path: Path, where: str, name: str) -> None:
    """What the optimizer has marked before its first step is there after each change."""
    config, function = {**FSDP2, "optimizer": name}, "tensor_parallel.train"
    plain = {**FSDP2, "optimizer": name if name == "factored" else "orthogonal"}
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", function, plain, WHOLE))
    moved = Run(tmp_path / "moved", with_a_rank_killed(crew, tmp_path / "moved", function, config, where))
    assert _distance(whole.after(cells.AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= ALLOWED


def test_each_tensor_travels_to_its_owner_and_back(crew: Crew, tmp_path: Path) -> None:
    config = {**FSDP2, "optimizer": "orthogonal", "url": str(tmp_path)}
    outcomes = crew.run(range(2), "tensor_parallel.train", config, **cells.of_run(config))
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    last = [use for use in outcomes[0].reports[-1].collectives if use.op == "all_to_all_single"]
    assert [(use.axis, use.calls) for use in last] == [("dp", 2)]


def test_deepspeeds_engine_refuses_several_by_name(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "optimizer": "muon", "layers": False, "url": str(tmp_path)}
    (outcome,) = crew.run([0], "tensor_parallel.train", config, **cells.of_run(config))
    assert outcome.result.kind == "usage_error"
    assert "several optimizers, or schedulers, are for engine: fsdp2" in outcome.result.message


OTHER_SHAPES = ["factored", "adafactor"]


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_stage_0_carries_what_has_other_shapes(crew: Crew, tmp_path: Path, name: str) -> None:
    config = {"stage": 0, "optimizer": name, "layers": False, "clipping": 0.3}
    function = "tensor_parallel.train"
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", function, config, WHOLE))
    moved = Run(tmp_path / "moved", with_a_rank_killed(crew, tmp_path / "moved", function, config, "step"))
    assert _distance(whole.after(cells.AT), moved.losses) <= ALLOWED
    found = moved.state()
    assert _distance(whole.state(), found) <= ALLOWED
    key = {"factored": "products.1", "adafactor": "exp_avg_sq_row"}[name]
    assert found[f"kept/optimizer/layers.0.mlp.up_proj.weight/{key}"].any()


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_from_a_checkpoint_it_goes_on_bit_by_bit(crew: Crew, tmp_path: Path, name: str) -> None:
    config, function, three = {**FSDP2, "optimizer": name}, "tensor_parallel.train", (0, 1, 2)
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", function, config, [(three, None)]))
    parts = [(three, 3), ((0, 2, 1), 5), (three, None)]
    again = Run(tmp_path / "again", cells.through(crew, tmp_path / "again", function, config, parts))
    assert _distance(whole.losses, again.losses) == _distance(whole.state(), again.state()) == 0


def test_a_damaged_factor_is_found_in_the_snapshot(crew: Crew, tmp_path: Path) -> None:
    config = {**FSDP2, "optimizer": "factored", "drift of a factor": 3, "url": str(tmp_path)}
    outcomes = crew.run(
        range(3), "tensor_parallel.train", config, **{**cells.of_run(config), "checkpoint_every_steps": 1}
    )
    assert {outcome.result.kind for outcome in outcomes} != {"finished"}
    assert "have drifted apart: kept/optimizer/embed.weight/squares.0 on rank 1" in outcomes[0].result.message


@pytest.mark.parametrize("engine", [FSDP2, {"stage": 0}], ids=["fsdp2", "stage0"])
def test_stages_of_a_pipeline_have_not_the_same(crew: Crew, tmp_path: Path, engine: Mapping[str, Any]) -> None:
    config = {**engine, "optimizer": "factored", "clipping": 0.0, "url": str(tmp_path)}
    function = "staged.train" if "engine" in engine else "pipelined.train"
    outcomes = crew.run(range(2), function, config, **{**cells.of_run(config), "pp": 2})
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert "keeps products, squares in another shape" in outcomes[0].result.message

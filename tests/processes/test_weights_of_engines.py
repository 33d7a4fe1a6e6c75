"""What one engine has trained is exported, and another run begins with it, whichever engine that has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import Run as Cells
from crew import Crew, Outcome
from test_oracle import FLOOR, LAST_STEP, Run, _distance, _engine, _undisturbed, damage_newest
from trainings import Small

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

FSDP2: dict[str, Any] = {"engine": "fsdp2", "fsdp2": {"shard": ["Linear"]}}


def test_fsdp2_exports_its_weights_and_begins_with_others(crew: Crew, tmp_path: Path) -> None:
    trained = _undisturbed(crew, tmp_path / "trained", FSDP2, 3)
    newest = CheckpointStore(str(tmp_path / "trained"), "run").list()[0]
    assert newest.step == LAST_STEP
    source = tmp_path / "trained" / "run" / "checkpoints" / newest.id
    folder = elastic.export(source, tmp_path / "out", to="torch")
    model = Small(0.0)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    for name, value in model.named_parameters():
        master = trained.state[f"master/{name}"].to(value.dtype)
        torch.testing.assert_close(value.detach().reshape(-1), master.reshape(-1), rtol=0, atol=0)

    first: dict[str, float] = {}
    for name, config in (("fsdp2", FSDP2), ("deepspeed", {"stage": 3})):
        for begins, more in (("with them", {"weights": {"source": str(source)}}), ("anew", {})):
            url = tmp_path / f"{name} {begins}"
            told = {**config, **more, "url": str(url)}
            outcomes = crew.run([0, 1], "train", told, batch=BatchSettings(max_steps=1), engine=_engine(config))
            first[f"{name} {begins}"] = float(Run(url, [outcomes]).losses["loss 1"])
    assert first["fsdp2 with them"] == pytest.approx(first["deepspeed with them"], rel=8 * FLOOR)
    assert first["fsdp2 anew"] == pytest.approx(first["deepspeed anew"], rel=8 * FLOOR)
    assert first["fsdp2 with them"] != pytest.approx(first["fsdp2 anew"], rel=1e-3)


SLOW = pytest.mark.slow
# Stages add up a batch's losses in another order.
ALLOWED = 1e-6
STAGED: dict[str, Any] = {"function": "staged.train", "engine": "fsdp2"}
PIPELINED: dict[str, Any] = {"function": "pipelined.train", "clipping": 0.0}
LOOPED: dict[str, Any] = {"blocks": 6, "fsdp2": {"pipeline_schedule": "Interleaved1F1B"}}


def begun(crew: Crew, url: Path, config: Mapping[str, Any], who: Sequence[int], **mesh: int) -> list[Outcome]:
    spec = {**cells.of_run(config), "batch": BatchSettings(max_steps=config.get("steps", 1)), **mesh}
    return crew.run(who, config["function"], {"schedule": False, **config, "url": str(url)}, **spec)


def steps_of(crew: Crew, url: Path, config: Mapping[str, Any], who: Sequence[int], **mesh: int) -> Cells:
    outcomes = begun(crew, url, config, who, **mesh)
    assert [outcome.result.kind for outcome in outcomes] == ["finished"] * len(who), outcomes[0].result
    return Cells(url, [outcomes], mesh.get("tp", 1))


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        pytest.param({**STAGED, "tied": True}, 1, id="fsdp2-tied"),
        pytest.param({**STAGED, **LOOPED, "tied": True}, 1, id="fsdp2-interleaved-tied", marks=SLOW),
        pytest.param({**STAGED, "plan": "all"}, 2, id="fsdp2-sliced", marks=SLOW),
        pytest.param({**PIPELINED, "stage": 1, "tied": True}, 1, id="stage1-tied"),
        pytest.param({**PIPELINED, "stage": 0, "tied": True}, 1, id="stage0-tied", marks=SLOW),
        pytest.param({**PIPELINED, "stage": 1, "dtype": "bf16"}, 1, id="stage1-bf16", marks=SLOW),
    ],
)
def test_stages_begin_with_the_weights_that_a_run_without_begins_with(
    crew: Crew, tmp_path: Path, config: dict[str, Any], tp: int
) -> None:
    """Two stages, one and four of a run of two stages, of its export, and of a run without."""
    trained = steps_of(crew, tmp_path / "trained", {**config, "steps": 2}, range(2 * tp), pp=2, tp=tp)
    source, anew = tmp_path / "trained" / "run", trained.losses["loss 1"]
    # A step at no rate changes no weight.
    config = {**config, "rate": 0.0}
    one = steps_of(crew, tmp_path / "one", {**config, "weights": {"source": str(source)}}, [0])
    found = {"one": one}
    folder = elastic.export(source, tmp_path / "folder", to="safetensors")
    for name, begins, who, pp in (
        ("two", source, (3, 1, 2, 0), 2),
        ("of a folder", folder, range(2 * tp), 2),
        ("of one", tmp_path / "one" / "run", range(4), 4 // tp),
    ):
        more = {**config, "weights": {"source": str(begins)}}
        found[name] = steps_of(crew, tmp_path / name, more, who, pp=pp, tp=tp)
    assert abs(float(one.losses["loss 1"] - anew)) > 1e-2
    before = trained.state(one.shapes[0])
    for name, run in found.items():
        assert _distance(one.losses, run.losses) <= (2e-2 if config.get("dtype") else ALLOWED), name
        state, expected = run.state(one.shapes[0]), one.state()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            if key.startswith(("master/", "param/")):
                assert torch.equal(state[key], value), (name, key)
                assert torch.equal(state[key], before[key]), (name, key)


@pytest.mark.parametrize(
    "config", [{**STAGED, "tied": True}, pytest.param({**PIPELINED, "stage": 1}, marks=SLOW)], ids=["fsdp2", "stage1"]
)
def test_a_source_that_does_not_fit_all_stages_is_refused_by_name(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """What no stage has; what one of them has not found; other tensors on one rank; a checkpoint with a turned bit."""
    source, folder = tmp_path / "trained" / "run", tmp_path / "folder"
    steps_of(crew, tmp_path / "trained", config, range(4))
    held = torch.load(elastic.export(source, folder, to="torch") / "model.pt")

    def refused(source: Path, said: str, **more: str) -> None:
        given = {**config, "weights": {"source": str(source)}, **more}
        outcomes = begun(crew, tmp_path / "refused", given, range(2), pp=2)
        messages = [outcome.result.message for outcome in outcomes]
        assert all(outcome.result.kind != "finished" and outcome.result.step == 0 for outcome in outcomes)
        assert any(said in message for message in messages), messages

    torch.save({**held, "scale": torch.ones(1)}, folder / "model.pt")
    refused(folder, "it has 'scale', which the model has not")
    lacking = [name for name in held if name.endswith("up_proj.weight")][-1]
    torch.save({name: value for name, value in held.items() if name != lacking}, folder / "model.pt")
    refused(folder, f"it lacks {lacking!r}")
    refused(source, "does not hold the same tensors on all nodes", **{"on rank 1": str(folder)})
    damage_newest(tmp_path / "trained")
    refused(source, "the checkpoint is damaged")

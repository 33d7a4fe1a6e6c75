"""What one engine has trained is exported, and another run begins with it, whichever engine that has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from test_oracle import FLOOR, LAST_STEP, Run, _engine, _undisturbed
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

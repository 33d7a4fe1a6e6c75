"""The planner's bytes against the tensors of unmodified DeepSpeed: not one byte off, up to 1,024 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_bytes import DTYPES, PERSISTENCE_THRESHOLD, REDUCE_BUCKET, STAGES, WORLDS
from deepspeed_ranks import GROUPS

from elastic.planner.memory_model import persistent_elements
from elastic.planner.model_shape import Tensors
from elastic.planner.states import BF16_ADAM, FP32_ADAM, state_bytes

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report = tmp_path_factory.mktemp("bytes") / "bytes.json"
    done = subprocess.run(
        [sys.executable, str(_HERE / "deepspeed_bytes.py"), str(report)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "examples")])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_deepspeed(dtype: str, stage: int, world_size: int, measured: dict[str, Any]) -> None:
    groups = [[Tensors(numel) for _, numel in group] for group in GROUPS]
    dtypes = {"fp32": FP32_ADAM, "bf16": BF16_ADAM}[dtype]
    persistent = persistent_elements([t for group in groups for t in group], world_size, PERSISTENCE_THRESHOLD)
    expected = vars(state_bytes(groups, stage, world_size, dtypes)) | {
        "bucket": REDUCE_BUCKET * dtypes.gradients if stage else 0,
        "persistent": persistent * dtypes.weights if stage == 3 else 0,
    }
    first, last = (measured[f"{dtype}-{stage}-{rank}-of-{world_size}"] for rank in (0, world_size - 1))
    assert first == expected
    assert last == {part: expected[part] for part in last}
    assert len(last) == (2 if stage == 3 else 6)

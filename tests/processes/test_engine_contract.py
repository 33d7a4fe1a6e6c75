"""Every engine, in each of its configurations, at one rank and at two, is what `elastic.training` takes it for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew

pytestmark = pytest.mark.processes

CONFIGS: dict[str, dict[str, Any]] = {
    "deepspeed-stage0": {"zero_optimization": {"stage": 0}},
    "deepspeed-stage1": {"zero_optimization": {"stage": 1}},
    "deepspeed-stage2": {"zero_optimization": {"stage": 2}},
    "deepspeed-stage3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 4}},
    "fsdp2": {},
    "fsdp2-layers": {"shard": ["Linear"]},
    "fsdp2-offload": {"cpu_offload": True},
    "fsdp2-hybrid": {"shard_workers": 2},
}


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, size) for name in CONFIGS for size in (1, 2)), ("fsdp2-hybrid", 4)]
)
def test_an_engine_keeps_the_contract(crew: Crew, tmp_path: Path, name: str, world_size: int) -> None:
    config = {"url": str(tmp_path), "native": CONFIGS[name]}
    for outcome in crew.run(range(world_size), "keep_the_contract", config, engine=name.partition("-")[0]):
        assert outcome.result.kind == "finished", outcome.result.traceback
        assert outcome.sockets == [], "a group of the generation that has ended"

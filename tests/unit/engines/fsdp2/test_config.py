"""The options of the FSDP2 engine: refused by name, and resolved to batch sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.fsdp2.config import check, read_options, resolve
from elastic.engines.select import check_config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradient_clip": 1.0}, "unknown option 'gradient_clip', did you mean 'gradient_clipping'"),
        ({"zero_optimization": {"stage": 3}}, "unknown option 'zero_optimization'"),
        ({"global_batch": 0}, "global_batch must be a whole number of samples"),
        ({"micro_batch": True}, "micro_batch must be a whole number of samples"),
        ({"gradient_clipping": -1}, "gradient_clipping must be a number, 0 for none"),
        ({"param_dtype": "float16"}, "float16 needs a loss scaler"),
        ({"shard": "Block"}, "shard must be a list of class names"),
        ({"cpu_offload": 1}, "cpu_offload must be true or false"),
        ({"optimizer": {"name": "AdamW"}}, "optimizer must be"),
        (
            {"pipeline_schedule": "zigzag"},
            "pipeline_schedule must be 1F1B or GPipe or Interleaved1F1B or LoopedBFS or Inter",
        ),
        ({"pipeline_stages_per_rank": 0}, "pipeline_stages_per_rank must be a whole number of stages, at least 1"),
        ({"pipeline_stages_per_rank": 2}, "pipeline_schedule 1F1B and pipeline_stages_per_rank 2 do not go together"),
        (
            {"pipeline_schedule": "LoopedBFS", "pipeline_stages_per_rank": 1},
            "1F1B and GPipe are for one stage per rank, ZBVZeroBubble and DualPipeV for two, Interleaved1F1B, ",
        ),
        ({"pipeline_schedule": "DualPipeV", "pipeline_stages_per_rank": 3}, "DualPipeV and .* 3 do not go together"),
        ({"pipeline_schedule": "ZBVZeroBubble"}, "ZBVZeroBubble needs reshard_after_forward: false"),
        ({"pipeline_schedule": "InterleavedZeroBubble"}, "needs reshard_after_forward: false"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_options(given)
    with pytest.raises(UsageError, match=f"^fsdp2: .*{said}"):
        check_config("fsdp2", given, BatchSettings(), (1, 2))


def test_a_schedule_for_several_stages_has_two_unless_more_are_said() -> None:
    looped = {"pipeline_schedule": "Interleaved1F1B"}
    found = [read_options(given).stages_per_rank for given in ({}, looped, {**looped, "pipeline_stages_per_rank": 3})]
    assert found == [1, 2, 3]
    assert (
        resolve(read_options({**looped, "micro_batch": 1}), BatchSettings(global_batch=4), 1).native[
            "pipeline_stages_per_rank"
        ]
        == 2
    )


@pytest.mark.parametrize(
    ("workers", "mesh", "said"),
    [
        (3, {"ep": 2}, r"shard_workers is 3, and mesh: {ep: 2} makes cells of 2 workers, which have all experts"),
        (6, {"ep": 2, "tp": 2, "pp": 4}, r"shard_workers is 6, and mesh: {tp: 2, ep: 2} makes cells of 4 workers"),
        (2, {"tp": 2}, r"shard_workers is 2, and mesh: {tp: 2} makes cells of 2 workers: give several whole cells"),
    ],
)
def test_copies_of_shards_are_of_whole_cells(workers: int, mesh: dict[str, int], said: str) -> None:
    check_config("fsdp2", {"shard_workers": 4}, BatchSettings(), (2, 4), **mesh)
    with pytest.raises(UsageError, match=said):
        check_config("fsdp2", {"shard_workers": workers}, BatchSettings(), (2, 4), **mesh)


def test_options_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_options(file)
    file.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_options(file)
    file.write_text('{"micro_batch": 2, "micro_batch": 4}')
    with pytest.raises(UsageError, match="the key 'micro_batch' is given twice"):
        read_options(file)
    file.write_text("[1]")
    with pytest.raises(UsageError, match="must be a JSON object"):
        read_options(str(file))
    file.write_text(json.dumps({"shard": ["Block"], "micro_batch": 2, "reduce_dtype": None}))
    options = read_options(file)
    assert (options.shard, options.micro_batch, options.reduce_dtype) == (("Block",), 2, None)


@pytest.mark.parametrize(
    ("job", "given", "loader", "said"),
    [
        (BatchSettings(), {"micro_batch": 2}, None, "no batch size"),
        (BatchSettings(), {"global_batch": 8}, None, "no micro-batch"),
        (BatchSettings(global_batch=16), {"global_batch": 8, "micro_batch": 2}, None, "given as 8 and as 16"),
        (BatchSettings(), {"global_batch": 8, "micro_batch": 2}, 4, "micro_batch is given as 2 and as 4"),
        (BatchSettings(), {"global_batch": 2, "micro_batch": 4}, None, "larger than the global batch"),
    ],
)
def test_batch_sizes_that_contradict_are_refused(
    job: BatchSettings, given: dict[str, Any], loader: int | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(read_options(given), job, 2, loader)


def test_batch_sizes_may_come_from_the_job_the_options_and_the_loader() -> None:
    resolved = resolve(read_options({"global_batch": 10}), BatchSettings(global_batch=10), 2, loader_batch=2)
    assert (resolved.global_batch, resolved.micro_batch, resolved.micro_steps) == (10, 2, 3)
    assert resolved.native["gradient_clipping"] == 0.0
    check({"micro_batch": 2}, BatchSettings(), (1, 4))  # the other may stand in the user's function

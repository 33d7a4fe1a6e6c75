"""From the user's DeepSpeed configuration to the one for this world size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.deepspeed.config import check, read_config, resolve
from elastic.engines.deepspeed.refused import REFUSED, refuse_model

NONE = BatchSettings()


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 12))
def test_what_deepspeed_gets_agrees_with_itself_at_any_world_size(total: int, micro: int, world_size: int) -> None:
    micro = min(micro, total)
    config = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro}
    made = resolve(config, NONE, world_size, max_world_size=12)
    assert (made.global_batch, made.micro_batch) == (total, micro)
    told = made.native
    assert told["train_batch_size"] == (
        told["train_micro_batch_size_per_gpu"] * told["gradient_accumulation_steps"] * world_size
    )
    assert told["train_batch_size"] >= total > told["train_batch_size"] - micro * world_size - micro
    assert told["gradient_accumulation_steps"] == made.micro_steps


@pytest.mark.parametrize(
    ("config", "batch", "expected"),
    [
        # A configuration for a fixed size is read with the maximum world size, here 4.
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, NONE, (24, 2)),
        ({"train_micro_batch_size_per_gpu": 2}, NONE, (8, 2)),
        ({"train_batch_size": 24}, NONE, (24, 6)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, NONE, (24, 2)),
        ({"train_batch_size": 10}, NONE, (10, 3)),
        ({"train_batch_size": "auto"}, BatchSettings(global_batch=12, micro_batch=3), (12, 3)),
        ({}, BatchSettings(global_batch=12), (12, 3)),
        ({"train_batch_size": 12}, BatchSettings(micro_batch=5), (12, 5)),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            BatchSettings(global_batch=8, micro_batch=2),
            (8, 2),
        ),
    ],
)
def test_where_the_batch_comes_from(config: dict[str, Any], batch: BatchSettings, expected: tuple[int, int]) -> None:
    for world_size in (1, 3, 4):
        made = resolve(config, batch, world_size, max_world_size=4)
        assert (made.global_batch, made.micro_batch) == expected


@pytest.mark.parametrize(
    ("config", "batch", "words"),
    [
        ({}, NONE, "no batch size"),
        ({"gradient_accumulation_steps": 2}, NONE, "no batch size"),
        ({"train_batch_size": 0}, NONE, "train_batch_size must be a positive"),
        ({"train_batch_size": True}, NONE, "train_batch_size must be a positive"),
        ({"train_batch_size": 8.0}, NONE, "train_batch_size must be a positive"),
        ({"train_batch_size": 8}, BatchSettings(global_batch=16), "global_batch 16 but"),
        ({"train_micro_batch_size_per_gpu": 8}, BatchSettings(micro_batch=4), "micro_batch 4 but"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 8}, NONE, "larger than the global batch"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            NONE,
            "contradictory",
        ),
        ({"train_batch_size": 8}, BatchSettings(micro_batch=0), "micro_batch must be at least 1"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, NONE, "zero_optimization.stage"),
    ],
)
def test_contradictions_are_told(config: dict[str, Any], batch: BatchSettings, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(config, batch, 2, max_world_size=4)


def test_a_job_may_leave_the_batch_to_its_training_function() -> None:
    check({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}, NONE, (1, 4))
    for config, words in (
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimisation": {}}, "zero_optimization"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    ):
        with pytest.raises(UsageError, match=words):
            check(config, NONE, (1, 4))
    with pytest.raises(UsageError, match="contradictory"):
        check(
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}, NONE, (1, 4)
        )


# A value with which each refused option is switched on.
_ON: dict[str, Any] = {
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_param.device": "nvme",
    "gradient_allreduce_op": "sum",
    "communication_data_type": "int8",
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
}


@pytest.mark.parametrize("path", [path for path, _, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(path: str) -> None:
    config: Any = _ON.get(path, {"enabled": True} if "." not in path else True)
    for key in reversed(path.split(".")):
        config = {key: config}
    with pytest.raises(UsageError, match=path.replace(".", r"\.")):
        resolve({"train_batch_size": 8, **config}, NONE, 2)


@pytest.mark.parametrize(
    ("world_size", "size", "words"),
    [
        (8, 4, "weights are gathered from 4 of 8 workers"),
        (6, 1, "weights are gathered from all workers: 6 are not several whole groups of 4"),
        (4, 1, "weights are gathered from all workers: 4 are not several whole groups of 4"),
    ],
)
def test_copies_of_weights_are_there_in_worlds_of_several_whole_groups(world_size: int, size: int, words: str) -> None:
    config = {"train_batch_size": 24, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    found = resolve(config, NONE, world_size, 8)
    assert found.native["zero_optimization"]["zero_hpz_partition_size"] == size
    assert words in found.said
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 4, "the user's own stays as it is"


@pytest.mark.parametrize(
    ("zero", "mesh", "sentence"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 2}, {}, "zero_hpz_partition_size is for stage 3"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, {}, "zero_hpz_partition_size must be a positive whole number"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, {"cell": 2, "tp": 2}, "not supported with mesh"),
    ],
)
def test_copies_of_weights_where_there_can_be_none_are_refused(
    zero: dict[str, Any], mesh: dict[str, int], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        resolve({"train_batch_size": 8, "zero_optimization": zero}, NONE, 4, **mesh)


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "elastic_checkpoint": False, "zero_quantized_gradients": False}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 2}},
        {"communication_data_type": "bf16"},
        {"communication_data_type": "FP16"},
        {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True},
        {"hybrid_engine": {"enabled": False}, "autotuning": {"enabled": False}, "nebula": None},
        {"optimizer": {"type": "AdamW"}, "checkpoint": {"tag_validation": "Ignore"}},
    ],
)
def test_harmless_options_pass(config: dict[str, Any]) -> None:
    assert resolve({"train_batch_size": 8, **config}, NONE, 2).global_batch == 8


def test_removed_optimizers_are_named() -> None:
    with pytest.raises(UsageError, match="OneBitAdam"):
        resolve({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}, NONE, 2)


def test_the_users_dictionary_is_left_alone() -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": False}
    before = json.dumps(config)
    made = resolve(config, NONE, 3)
    made.native["zero_optimization"]["stage"] = 3
    assert json.dumps(config) == before
    assert made.native["zero_allow_untested_optimizer"] is False


def test_comms_logger_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    resolve({"train_batch_size": 8, "comms_logger": {"enabled": True}}, NONE, 2)
    assert "comms_logger" in caplog.text


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    assert read_config(str(path)) == read_config(path) == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("{", "is not JSON"), ("[1]", "must be a JSON object")]
)
def test_a_bad_path_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_config(path)


def test_something_else_is_no_configuration() -> None:
    with pytest.raises(UsageError, match="not int"):
        read_config(3)  # type: ignore[arg-type]


def test_models_that_cannot_be_resharded_are_refused() -> None:
    class Model:
        def __init__(self, home: str) -> None:
            self.layer = type("Layer", (), {"__module__": home})()

        def modules(self) -> list[Any]:
            return [self, self.layer]

    refuse_model(Model("users.own"))
    with pytest.raises(UsageError, match="pipeline"):
        refuse_model(Model("deepspeed.runtime.pipe.module"))

"""What the mesh sets of experts in a DeepSpeed configuration, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.deepspeed.config import check, resolve
from elastic.engines.deepspeed.experts.config import size_of

NONE = BatchSettings()
UNCLIPPED = {"zero_optimization": {"stage": 0}, "gradient_clipping": 0}
GIVEN = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


def test_the_mesh_sets_the_size_and_the_users_keys_stay() -> None:
    section = {"preset_model": "mixtral"}
    made = resolve({**GIVEN, "expert_parallel": section}, NONE, 4, ep=2)
    assert made.native["expert_parallel"] == {"preset_model": "mixtral", "enabled": True, "autoep_size": 2}
    assert size_of(made.native) == 2
    assert (made.global_batch, made.micro_steps, made.native["train_batch_size"]) == (24, 3, 24), "of four ranks"
    assert section.keys() == {"preset_model"}, "the user's dictionary is left alone"


def test_without_a_mesh_experts_that_were_enabled_are_all_on_each_rank() -> None:
    made = resolve({**GIVEN, "expert_parallel": {"enabled": True}}, NONE, 3)
    assert made.native["expert_parallel"] == {"enabled": True, "autoep_size": 1}
    assert size_of(made.native) == 1
    for section in ({}, {"enabled": False}, {"autoep_size": 1}):
        assert size_of(resolve({**GIVEN, "expert_parallel": section}, NONE, 3).native) == 0


def test_experts_are_shared_beside_sequences() -> None:
    made = resolve(GIVEN, NONE, 2, cell=2, ep=2)
    assert (made.micro_steps, made.native["train_batch_size"]) == (6, 48), "to DeepSpeed all four are data parallel"


def test_ranks_that_share_layers_divide_the_experts_further() -> None:
    made = resolve({**GIVEN, "expert_parallel": {"autoep_size": 4}}, NONE, 2, cell=2, tp=2, ep=2)
    assert size_of(made.native) == made.native["expert_parallel"]["autoep_size"] == 4
    assert made.native["tensor_parallel"]["autotp_size"] == 2
    # Experts that are all on each rank where none share layers.
    enabled = {**GIVEN, "expert_parallel": {"enabled": True}}
    assert size_of(resolve(enabled, NONE, 2, cell=2, tp=2).native) == 2
    assert size_of(resolve(GIVEN, NONE, 2, cell=2, tp=2).native) == 0


@pytest.mark.parametrize(
    ("given", "mesh", "said"),
    [
        (
            {"zero_optimization": {"stage": 1}},
            {"cell": 2, "pp": 2},
            r"pp: 2\}: ep with pp, or with both sp and tp, is supported with engine: fsdp2",
        ),
        ({}, {"cell": 4, "tp": 2}, r"sp: 2, tp: 2, ep: 2\}: ep with pp, or with both sp and tp, is supported"),
        ({"expert_parallel": {"autoep_size": 2}}, {"cell": 2, "tp": 2}, "autoep_size is 2, .* mesh says ep: 2, tp: 2"),
        (UNCLIPPED, {"cell": 2, "tp": 2}, r"tp: 2, ep: 2\} with experts is not supported in stage 0: use zero_opt"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {"cell": 2, "tp": 2},
            "zero_optimization.offload_optimizer: DeepSpeed refuses it with experts and mesh",
        ),
    ],
)
def test_what_does_not_work_beside_other_axes_is_refused(
    given: dict[str, Any], mesh: dict[str, int], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        resolve({**GIVEN, **given}, NONE, 2, ep=2, **mesh)


def test_stage_0_is_taken_where_nothing_is_clipped() -> None:
    assert size_of(resolve({**GIVEN, **UNCLIPPED}, NONE, 4, ep=2).native) == 2
    assert (
        size_of(resolve({**GIVEN, "zero_optimization": {}, "expert_parallel": {"enabled": True}}, NONE, 3).native) == 1
    )


@pytest.mark.parametrize(
    ("given", "ep", "said"),
    [
        ({"expert_parallel": {"autoep_size": 4}}, 1, "autoep_size is 4, and the job's mesh says ep: 1; give the job's"),
        ({"expert_parallel": {"autoep_size": 4}}, 2, "autoep_size is 4, and the job's mesh says ep: 2"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 1}},
            2,
            "autoep_size is 1, and the job's mesh says ep: 2",
        ),
        ({"expert_parallel": {"enabled": False}}, 2, "enabled is false, and the job's mesh says ep: 2"),
        ({"expert_parallel": {"expert_tensor_parallel_size": 2}}, 2, "experts that are sliced too"),
        ({"expert_parallel": {"comm_backend": "deepep"}}, 2, "expert_parallel.comm_backend: its buffers"),
        ({"use_data_before_expert_parallelism": True}, 2, "the ranks that share experts are neighbours here"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 2, "data_types.grad_accum_dtype"),
        ({"zero_optimization": {"stage": 0}}, 2, "its default.*ep: 2: in stage 0 DeepSpeed clips by the mean of norms"),
        ({"zero_optimization": {}, "gradient_clipping": 0.5}, 2, "use zero_optimization.stage 1, 2 or 3, or gradient_"),
        (
            {**UNCLIPPED, "bf16": {"enabled": True}},
            2,
            "stage is 0 with bf16, fp16 or torch_autocast, and the job's mesh",
        ),
        ({**UNCLIPPED, "torch_autocast": {"enabled": True}}, 2, "use stage 1, 2 or 3"),
    ],
)
def test_what_contradicts_the_mesh_or_does_not_work_is_refused(given: dict[str, Any], ep: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve({**GIVEN, **given}, NONE, 2, ep=ep)
    with pytest.raises(UsageError, match=said):
        check({**GIVEN, **given}, NONE, (1, 2), ep=ep)

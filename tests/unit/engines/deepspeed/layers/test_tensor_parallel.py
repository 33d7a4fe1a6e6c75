"""What the mesh sets in a DeepSpeed configuration, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.deepspeed.config import check, resolve
from elastic.engines.deepspeed.layers.tensor_parallel import refuse_plan, require_slices, size_of
from elastic.engines.fsdp2.config import check as check_fsdp2

NONE = BatchSettings()
GIVEN = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


def test_the_mesh_sets_the_size_and_the_users_cut_stays() -> None:
    cut = {"partition_config": {"use_default_specs": False, "layer_specs": []}}
    made = resolve({**GIVEN, "tensor_parallel": cut}, NONE, 3, cell=2, tp=2)
    assert made.native["tensor_parallel"] == {**cut, "autotp_size": 2, "vocab_parallel_lm_head": False}
    assert size_of(made.native) == 2
    assert (made.global_batch, made.micro_steps) == (24, 4), "of three cells"
    assert cut.keys() == {"partition_config"}, "the user's dictionary is left alone"
    # DeepSpeed counts the ranks of its nominal batch differently in stage 3: it works it out by itself.
    assert "train_batch_size" not in made.native


def test_without_a_mesh_nothing_is_set() -> None:
    made = resolve({**GIVEN, "tensor_parallel": {"autotp_size": 1}}, NONE, 3)
    assert made.native["tensor_parallel"] == {"autotp_size": 1}
    assert made.native["train_batch_size"] == 24
    assert size_of(resolve(GIVEN, NONE, 3).native) == 1


@pytest.mark.parametrize(
    ("section", "tp", "said"),
    [
        ({"autotp_size": 4}, 1, r"autotp_size is 4, and the job's mesh says tp: 1; give the job's mesh: {tp: 4} alone"),
        ({"autotp_size": 4}, 2, r"autotp_size is 4, and the job's mesh says tp: 2"),
        ({"autotp_size": 1}, 2, r"autotp_size is 1, and the job's mesh says tp: 2"),
        ({"tp": {"tp_size": 4}}, 2, r"tensor_parallel.tp.tp_size is 4, and the job's mesh says tp: 2"),
        ({"vocab_parallel_lm_head": True}, 2, "vocab_parallel_lm_head: losses over slices of the vocabulary"),
        ({"keep_module_on_host": True}, 2, "keep_module_on_host"),
        ({"kernel_inject": True}, 2, "kernel_inject: its kernels are for inference"),
    ],
)
def test_what_contradicts_the_mesh_or_does_not_work_is_refused(section: dict[str, Any], tp: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve({**GIVEN, "tensor_parallel": section}, NONE, 2, cell=tp, tp=tp)
    with pytest.raises(UsageError, match=said):
        check({"tensor_parallel": section}, NONE, (1, 2), tp)


@pytest.mark.parametrize("section", [{"autotp_size": 2}, {"autotp_size": 0}, {"tp": {"tp_size": 1}}])
def test_what_agrees_with_the_mesh_passes(section: dict[str, Any]) -> None:
    assert size_of(resolve({**GIVEN, "tensor_parallel": section}, NONE, 2, cell=2, tp=2).native) == 2


def test_a_plan_in_torchs_terms_is_not_for_autotp() -> None:
    check_fsdp2({}, NONE, (1, 2), 2)
    refuse_plan(None)
    with pytest.raises(UsageError, match="tp_plan is for engine: fsdp2; with DeepSpeed say in tensor_parallel"):
        refuse_plan({"layers.*.up": "colwise"})


def test_a_model_of_which_nothing_was_cut_is_named() -> None:
    class Parameter:
        tensor_model_parallel = False

    class Model:
        def __init__(self) -> None:
            self.own = Parameter()

        def parameters(self) -> list[Any]:
            return [self.own]

    model = Model()
    with pytest.raises(UsageError, match=r"AutoTP has found no layer to slice in Model.*or leave mesh.tp \(2\) out"):
        require_slices(model, 2)
    model.own.tensor_model_parallel = True
    require_slices(model, 2)

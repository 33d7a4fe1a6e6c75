"""The cases that three processes run one after the other. Each is (rank, folder) -> None."""

from __future__ import annotations

from functools import partial

import native_failures
import native_later
from native_case import Case, run_case
from native_model import Setup

# Sub-groups of a few parameters, and parameters both above and below the size that stays whole on every rank.
_SUBS = {"sub_group_size": 60, "stage3_param_persistence_threshold": 10}
_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_ROUND_ROBIN = {"round_robin_gradients": True}

_CASES = [
    Case("stage2-adamw", Setup(2), (2, 2, 1, 3), used=True),
    Case("stage2-aligned-from-1", Setup(2, "amsgrad", zero={"parameter_alignment": True}), (1, 2)),
    Case("stage1-sgd-round-robin", Setup(1, "sgd", zero=_ROUND_ROBIN), (3, 1, 2, 3)),
    Case("stage3-adamw", Setup(3, zero=_SUBS), (2, 2, 1, 3)),
    Case("stage3-sgd-one-sub-group", Setup(3, "sgd"), (3, 2)),
    Case("stage3-from-1", Setup(3, zero={"sub_group_size": 60}), (1, 2)),
    Case("stage0-adamw", Setup(0), (2, 2, 1, 3)),
    Case("stage0-sgd", Setup(0, "sgd"), (3, 2)),
    Case("stage2-no-state", Setup(2, "plain"), (2, 3)),
    Case("stage2-bf16", Setup(2, bf16=True), (2, 2, 3)),
    Case("stage3-bf16", Setup(3, bf16=True, zero=_SUBS), (3, 3, 2), used=True),
    Case("stage0-bf16", Setup(0, bf16=True), (2, 2, 3), used=True),
    Case(
        "stage1-bf16-optimizer",
        Setup(1, bf16=True, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
        (3, 3, 2),
        used=True,
    ),
    Case("stage2-offload", Setup(2, zero=_OFFLOAD), (2, 2, 3)),
    Case(
        "stage3-offload", Setup(3, zero=_SUBS | _OFFLOAD | {"offload_param": {"device": "cpu"}}), (2, 2, 3), used=True
    ),
    Case("stage2-to-3", Setup(2), (2, 3), into=Setup(3, zero=_SUBS)),
    Case("stage3-to-1", Setup(3, zero=_SUBS), (3, 2), into=Setup(1, zero=_ROUND_ROBIN)),
    Case("stage3-to-0", Setup(3, zero=_SUBS), (2, 1), into=Setup(0)),
    Case("stage0-to-2", Setup(0), (2, 3), into=Setup(2)),
]

CASES = {case.name: partial(run_case, case) for case in _CASES} | native_failures.CASES | native_later.CASES

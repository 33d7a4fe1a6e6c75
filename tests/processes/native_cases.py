"""The cases that three processes run one after the other. Each is (rank, folder) -> None."""

from __future__ import annotations

from functools import partial

from native_case import Case, run_case
from native_model import Setup

_SMALL = {"sub_group_size": 60, "stage3_param_persistence_threshold": 10}

_CASES = [
    Case("stage2-adamw", Setup(2), (2, 2, 1, 3)),
    Case("stage1-sgd-round-robin", Setup(1, "sgd", zero={"round_robin_gradients": True}), (3, 1, 2, 3)),
]

CASES = {case.name: partial(run_case, case) for case in _CASES}

"""A step of the lab, as its training function writes it down."""

from __future__ import annotations

from typing import Any

from elastic.planner.links import Link

LINK = Link(0.001, 1e-9)
# Tensors of 10 and 7 elements on 3 ranks: 84 bytes with padding.
TENSORS = (10, 7)


def call(op: str, size: int, began_s: float, seconds: float, waited_s: float) -> dict[str, Any]:
    return {
        "op": op, "axis": "dp", "dtype": "float32", "bytes": size,
        "began_s": began_s, "seconds": seconds, "waited_s": waited_s,
    }  # fmt: skip


GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"
STEP: dict[str, Any] = {
    "step": 7, "generation": 1, "world_size": 3, "rank": 0, "stage": 3,
    "memory": {"weights": 28, "master": 28, "moments": 56, "gradients": 28},
    "phases": [["forward", 0.0, 0.1], ["backward", 0.1, 0.3], ["step", 0.3, 0.32]],
    # As they were completed: the second one began before the first.
    "calls": [
        call(GATHERS, 42, 0.02, 0.01, 0.01), call(GATHERS, 42, 0.01, 0.03, 0.0),
        call(SCATTERS, 100, 0.15, 0.01, 0.01), call(SCATTERS, 68, 0.25, 0.02, 0.005),
        call("all_reduce", 8, 0.31, 0.001, 0.001),
    ],
}  # fmt: skip

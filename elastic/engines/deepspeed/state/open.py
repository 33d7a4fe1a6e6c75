"""The sharded state of one engine, by what partitions it."""

from __future__ import annotations

from typing import Any

from elastic.engines.deepspeed.state.layout_check import check_layout
from elastic.engines.deepspeed.state.partitioned import PartitionedState
from elastic.engines.deepspeed.state.replicated import ReplicatedState
from elastic.engines.deepspeed.state.stage3 import Stage3State
from elastic.engines.deepspeed.state.unsupported import refuse_unsupported
from elastic.engines.deepspeed.state.zero import ZeroState


def open_zero_state(engine: Any) -> ZeroState:
    """Not collective. Raises UsageError for what cannot move to another world size (named, with the reason) and for a
    DeepSpeed that partitions otherwise than the pure layouts."""
    refuse_unsupported(engine)
    state = zero_state(engine)
    check_layout(state)
    return state


def zero_state(engine: Any) -> ZeroState:
    match int(engine.zero_optimization_stage()):
        case 3:
            return Stage3State(engine)
        case 1 | 2:
            return PartitionedState(engine)
        case _:
            return ReplicatedState(engine)

"""What memory a generation needs on this rank, told once: by it the meshes of later ones are predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.data.step_plan import StepPlan
from elastic.core.sharding.mesh_memory import adds_up
from elastic.core.typed_json import encode
from elastic.training.scope import GenerationScope
from elastic.training.state.engine_state import EngineState
from elastic.training.watch.held_state import held_state
from elastic.training.watch.memory_use import memory_use

# The optimizer makes its state in the first step of a run, and buffers grow in the first of a generation.
_AFTER_STEPS = 3


class MemoryReport:
    """`step_closed` after every step, on the training thread."""

    def __init__(self, scope: GenerationScope, state: EngineState, plan: StepPlan) -> None:
        self._scope, self._plan = scope, plan
        self._state: EngineState | None = state
        self._left = _AFTER_STEPS

    def step_closed(self) -> None:
        state, self._left = self._state, self._left - 1
        if state is None or self._left > 0:
            return
        self._state = None
        told = self._told(state)
        if told is not None:
            self._scope.coordinator.memory_used(told)

    def _told(self, state: EngineState) -> dict[str, Any] | None:
        spec, device = self._scope.spec, self._scope.device
        used = memory_use(device, spec.worker_memory_bytes)
        if used is None:
            return None
        held, own = held_state(state.sharded, device, spec.tp, adds_up(spec.mesh.pp, self._plan.micro_steps))
        # One rank of each stage tells of its layers: the others have the same.
        leads = spec.mesh.data(spec.rank) == spec.mesh.sequence(spec.rank) == spec.mesh.tensor(spec.rank) == 0
        plan, follows = self._plan, spec.batch.adaptive is not None
        passes = -(-plan.global_batch // plan.micro_batch)
        held = replace(held, micro_steps=plan.micro_steps) if follows else replace(held, passes=passes)
        return {**used._asdict(), "state_bytes": own, "held": encode(held) if leads else None}

"""What memory a generation needs on this rank, told once: by it the meshes of later ones are predicted."""

from __future__ import annotations

from typing import Any

from elastic.core.typed_json import encode
from elastic.training.scope import GenerationScope
from elastic.training.state.engine_state import EngineState
from elastic.training.watch.held_state import held_state
from elastic.training.watch.memory_use import memory_use

# The optimizer makes its state in the first step of a run, and buffers grow in the first of a generation.
_AFTER_STEPS = 3


class MemoryReport:
    """`step_closed` after every step, on the training thread."""

    def __init__(self, scope: GenerationScope, state: EngineState) -> None:
        self._scope = scope
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
        held, own = held_state(state.sharded, device, spec.tp)
        # One rank of each stage tells of its layers: the others have the same.
        leads = spec.mesh.data(spec.rank) == spec.mesh.sequence(spec.rank) == spec.mesh.tensor(spec.rank) == 0
        return {**used._asdict(), "state_bytes": own, "held": encode(held) if leads else None}

"""What a run saves besides the engine's state, and how a generation resumes from it."""

from __future__ import annotations

from typing import Any

from elastic.core.data.readers import READERS, ReaderStates
from elastic.core.data.step_plan import StepPlan
from elastic.training.data import cursor
from elastic.training.scope import GenerationScope
from elastic.training.session import Phase
from elastic.training.state.engine_state import EngineState
from elastic.training.user.state import State, objects_from_json, objects_to_json

_OBJECTS = "objects"
_FIRST_RATES = "first_rates"


def run_state(scope: GenerationScope, plan: StepPlan, user: State) -> dict[str, Any]:
    """The data cursor after the step just finished, and the user's own state; JSON. The tensors of registered objects
    are kept next to it: `user.captured` has them."""
    return {
        **cursor.to_state(plan, scope.spec.seed, scope.step),
        **({_FIRST_RATES: list(user.first_rates)} if user.first_rates else {}),
        "user": user.dump(),
        _OBJECTS: objects_to_json(user.capture()),
    }


def resume(
    scope: GenerationScope, state: EngineState, plan: StepPlan, user: State
) -> tuple[StepPlan, ReaderStates | None]:
    """Restore the spec's checkpoint into the engine, `scope` and `user`; returns the plan that the run resumes with,
    and the states of all readers of a stream.

    Collective. Raises UsageError, ModelMismatch, IntegrityError or StorageError, on all ranks or on none.
    """
    assert scope.spec.checkpoint is not None
    scope.enter(Phase.RESTORING)
    report, restored = state.restore(scope.coordinator.source(), scope.spec.checkpoint, later=True)
    saved = {key: value for key, value in restored.items() if key != READERS}
    cursor.validate(saved, plan, scope.spec.seed)
    plan = cursor.from_state(saved, plan, scope.spec.batch)
    scope.step = int(saved["step"])
    user.load(saved["user"])
    user.first_rates = tuple(saved.get(_FIRST_RATES, ()))
    user.load_objects(objects_from_json(saved.get(_OBJECTS, {}), state.restored), scope.device)
    here = run_state(scope, plan, user)
    # Objects may be registered later: what they are given has been verified with the tensors.
    kept = {key: value for key, value in saved.items() if key != _OBJECTS}
    cursor.verify(kept, here, plan, plan.order(scope.spec.seed), state.agreement)
    readers = cursor.readers_of(restored.get(READERS), plan, state.agreement)
    scope.coordinator.restored(report)
    scope.enter(Phase.BUILDING)
    return plan, readers

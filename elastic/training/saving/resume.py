"""What a run saves besides the engine's state, and how a generation resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic.checkpoint.shares import Newer
from elastic.core.data.readers import READERS, ReaderStates
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.steps import StepReport, shared_out
from elastic.engines.base import Engine
from elastic.training.data import cursor
from elastic.training.in_loop import unfinished
from elastic.training.in_loop.step_share import Unfinished
from elastic.training.scope import GenerationScope
from elastic.training.session import Phase
from elastic.training.state.engine_state import EngineState
from elastic.training.state.extra_state import install_extra
from elastic.training.user.comparison import fingerprints
from elastic.training.user.state import State, objects_from_json, objects_to_json

_OBJECTS = "objects"
_FIRST_RATES = "first_rates"
_SAVES = "saves"


@dataclass(frozen=True)
class Resumed:
    """The plan that the run resumes with, the states of all readers of a stream, and what this rank brings along of the
    next step."""

    plan: StepPlan
    readers: ReaderStates | None = None
    carried: Unfinished | None = None


def run_state(scope: GenerationScope, plan: StepPlan, user: State) -> dict[str, Any]:
    """The data cursor after the step just finished, and the user's own state; JSON. The tensors of registered objects
    are kept next to it: `user.captured` has them."""
    return {
        **cursor.to_state(plan, scope.spec.seed, scope.step),
        **({_FIRST_RATES: list(user.first_rates)} if user.first_rates else {}),
        **({_SAVES: True} if user.saves else {}),
        "user": user.dump(),
        _OBJECTS: objects_to_json(user.capture()),
    }


def resume(
    scope: GenerationScope,
    state: EngineState,
    plan: StepPlan,
    user: State,
    module: torch.nn.Module,
    held: Unfinished | None,
) -> Resumed:
    """Restore the spec's checkpoint into the engine, `scope` and `user`. `held`: what this rank had computed of a step
    when the last engine of its `module` ended.

    Collective. Raises UsageError, ModelMismatch, IntegrityError or StorageError, on all ranks or on none.
    """
    assert scope.spec.checkpoint is not None
    scope.enter(Phase.RESTORING)
    report, restored = state.restore(scope.coordinator.source(), scope.spec.checkpoint, later=True)
    plan = _placed(scope, state, plan, user, {key: value for key, value in restored.items() if key != READERS})
    readers = cursor.readers_of(restored.get(READERS), plan, state.agreement)
    carried, why = None, "" if held is None else held.why
    if unfinished.refused(plan, scope.spec) is None and not plan.over(scope.step):
        restored_user = {} if held is None or held.why else fingerprints(user)
        plan, carried, why = unfinished.continued(held, plan, scope.step, module, restored_user, state.agreement)
    kept = 0 if carried is None else len(carried.batches)
    scope.coordinator.restored(replace(report, kept=kept, again=why))
    scope.enter(Phase.BUILDING)
    return Resumed(plan, readers, carried)


def catch_up(
    scope: GenerationScope, engine: Engine, state: EngineState, resumed: Resumed, user: State, newer: Newer | None
) -> tuple[Resumed, list[StepReport]]:
    """Go on from a later state than the one that was restored, or that the run begins with. Returns also this rank's
    reports of the steps in between. Collective."""
    if newer is None:
        return resumed, []
    state.verified()
    newer.install()
    state.sharded.finish_install()
    install_extra(engine, state.sharded, newer.told)
    plan = _placed(scope, state, resumed.plan, user, newer.told["caller"])
    spec = scope.spec
    own = [
        shared_out([StepReport.from_json(each, spec.generation, 0) for each in reports], spec.rank, spec.world_size)
        for _, reports in sorted(newer.reports.items())
    ]
    return replace(resumed, plan=plan), own


def _placed(
    scope: GenerationScope, state: EngineState, plan: StepPlan, user: State, saved: Mapping[str, Any]
) -> StepPlan:
    """`run_state` as it was saved becomes that of this generation."""
    cursor.validate(saved, plan, scope.spec.seed)
    plan = cursor.from_state(saved, plan, scope.spec.batch)
    scope.step = int(saved["step"])
    user.load(saved["user"])
    user.first_rates = tuple(saved.get(_FIRST_RATES, ()))
    user.saves = bool(saved.get(_SAVES, False))
    user.load_objects(objects_from_json(saved.get(_OBJECTS, {}), state.restored), scope.device)
    here = run_state(scope, plan, user)
    # Objects may be registered later: what they are given has been verified with the tensors.
    judged = {key: value for key, value in saved.items() if key != _OBJECTS}
    cursor.verify(judged, here, plan, plan.order(scope.spec.seed), state.agreement)
    return plan

"""Before the first batch of a generation: the user's own objects get their saved state, or it is said what does not."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.errors import UsageError
from elastic.engines.base import Engine
from elastic.training.scope import GenerationScope
from elastic.training.state.engine_state import EngineState
from elastic.training.user import found
from elastic.training.user.state import State

logger = logging.getLogger(__name__)

# Once per process is enough.
_named: set[str] = set()


def before_first_batch(scope: GenerationScope, user: State, engine: Engine, state: EngineState, dataset: Any) -> None:
    """Keep the schedulers that the training function steps itself and did not register.

    After a restore also: every object has its state, the optimizer's hyper-parameters are the restored ones, and what
    the function holds besides is named. Raises UsageError where an object is missing, or cannot be kept.
    """
    groups = {id(group) for group in state.param_groups()}
    platforms = _platforms(engine, state)
    _refuse_ours(user, platforms)
    objects = {name: value for name, value in found.visible(dataset).items() if not _is_ours(value)}
    known = {id(target) for target in user.objects.values()} | set(platforms)
    unregistered = found.schedulers(objects, groups, known)
    for name, target in unregistered.items():
        _keep(user, name, target)
    user.require_claimed()
    if scope.spec.checkpoint is None:
        return
    if unregistered or any(_steers(target, groups) for target in user.objects.values()):
        state.reinstall_groups()
    known |= {id(target) for target in unregistered.values()}
    own = getattr(engine.native, "lr_scheduler", None)
    same_schedules({**user.objects, "of the engine": own}, resumed=not is_snapshot(scope.spec.checkpoint))
    if scope.spec.rank == 0:
        _name_the_rest(found.not_kept(objects, known))


def same_schedules(schedulers: Mapping[str, Any], resumed: bool) -> None:
    """After a restore: torch's LambdaLR, which transformers' `get_scheduler` gives, saves no function, and one that was
    made for another number of steps goes on with other rates. Raises UsageError; where the run is `resumed`, which may
    change a schedule, warns."""
    for name, target in schedulers.items():
        if not isinstance(target, torch.optim.lr_scheduler.LambdaLR):
            continue
        before, rates = target.get_last_lr(), zip(target.base_lrs, target.lr_lambdas, strict=True)
        now = [base * by(target.last_epoch) for base, by in rates]
        if all(math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) for one, other in zip(now, before, strict=True)):
            continue
        sentence = (
            f"the schedule {name} gives learning rate {now[0]:g} after {target.last_epoch} steps, and gave "
            f"{before[0]:g}: it is made for another number of steps, as by len() of a DataLoader with a "
            "DistributedSampler, which follows the number of workers; count epochs * ceil(len(dataset) / global batch)"
        )
        if not resumed:
            raise UsageError(f"{sentence}, and resume the run")
        logger.warning(sentence)


def _name_the_rest(begun_anew: Mapping[str, str]) -> None:
    begun_anew = {name: kind for name, kind in begun_anew.items() if name not in _named}
    _named.update(begun_anew)
    of_data = {name: kind for name, kind in begun_anew.items() if name.startswith(f"{found.DATASET}.")}
    others = {name: kind for name, kind in begun_anew.items() if name not in of_data}
    if of_data:
        logger.warning(
            "%s: its draws depend on which rank reads which sample, and it begins anew at each recovery; draw from "
            "torch, numpy or random instead, which are seeded by the position of each sample",
            _listed(of_data),
        )
    if others:
        logger.warning(
            "not kept: %s; after this recovery each rank has them as its function made or left them. Where training "
            "changes one of them, call elastic.state.register(name=object)",
            _listed(others),
        )


def _listed(objects: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in objects.items())


def _keep(user: State, name: str, target: Any) -> None:
    if name in user.objects:
        raise UsageError(
            f"the scheduler {name!r} ({type(target).__qualname__}) sets the learning rate and is not registered, and "
            f"another object is registered as {name!r}: call elastic.state.register with a name of its own"
        )
    user.register(**{name: target})
    logger.info("the scheduler %s (%s) is kept, as if registered", name, type(target).__qualname__)


def _platforms(engine: Engine, state: EngineState) -> dict[int, str]:
    """id -> what it is, of objects whose state is the platform's."""
    native = engine.native
    platforms = {id(module): "a part of the model" for module in engine.module.modules()}
    platforms |= {id(native): "the engine", id(engine.module): "the model"}
    platforms |= {id(getattr(native, "lr_scheduler", None)): "the engine's scheduler"}
    optimizers = (getattr(native, "optimizer", None), state.base)
    return platforms | {id(target): "the engine's optimizer" for target in optimizers}


def _is_ours(value: Any) -> bool:
    """The engine, the loader, or what stands in for the engine's optimizer and scheduler."""
    return type(value).__module__.partition(".")[0] == "elastic"


def _refuse_ours(user: State, platforms: Mapping[int, str]) -> None:
    for name, target in user.objects.items():
        if _is_ours(target) or id(target) in platforms:
            what = platforms.get(id(target), "the engine")
            raise UsageError(
                f"elastic.state.register({name}=...): this is {what}, whose state is kept already; remove it"
            )


def _steers(target: Any, groups: set[int]) -> bool:
    return any(id(group) in groups for group in getattr(getattr(target, "optimizer", None), "param_groups", ()))

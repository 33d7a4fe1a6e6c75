"""The part of a run's state that is not tensors: the engine's own part, the optimizer's scalars, and the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.core.checkpoint.manifest import Json, Manifest
from elastic.core.errors import IntegrityError, ModelMismatch
from elastic.engines.base import Engine
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import ShardedState, TensorSpec
from elastic.engines.optimizer.state import check_groups, encode_scalars, install_groups, read_groups

_KEYS = ("engine", "optimizer", "loss_scaler", "scheduler", "fleeting_buffers", "caller")


def read_extra(
    engine: Engine,
    state: ShardedState,
    inventory: Inventory,
    caller: Mapping[str, Json],
    specs: Sequence[TensorSpec] | None = None,
) -> dict[str, Json]:
    """JSON of everything but the tensors; `caller` comes back unchanged from a restore. `specs`: the state's, where
    they are known.

    Raises UsageError for a scheduler or an optimizer that keeps what JSON cannot hold.
    """
    return {
        **engine.extra_state(),
        "optimizer": {
            "class": type(state.base).__name__,
            "groups": read_groups(state),
            "scalars": encode_scalars(list(inventory.masters), list(inventory.states)),
        },
        "fleeting_buffers": [spec.name for spec in (state.specs() if specs is None else specs) if not spec.persistent],
        "caller": dict(caller),
    }


def read_alone(engine: Engine, state: ShardedState, kept: object, caller: Mapping[str, Json]) -> dict[str, Json] | None:
    """`read_extra`, where that and the optimizer's tensors are all of the state; None where others belong to it:
    buffers, frozen parameters, tensors of registered objects (`kept`)."""
    inventory = Inventory.of(state)
    return None if kept or inventory.extras else read_extra(engine, state, inventory, caller)


def extra_of(manifest: Manifest) -> Mapping[str, Json]:
    """The extra state of a checkpoint. Raises IntegrityError where a part is missing."""
    missing = set(_KEYS) - set(manifest.extra_state)
    if missing:
        raise IntegrityError(f"checkpoint {manifest.id} lacks the extra state {sorted(missing)}")
    return manifest.extra_state


def check_extra(engine: Engine, state: ShardedState, saved: Mapping[str, Json]) -> None:
    """Raises ModelMismatch where the checkpoint's optimizer, groups, scheduler or loss scaler are of another kind."""
    live = engine.extra_state()
    _same("optimizer", saved["optimizer"]["class"], type(state.base).__name__)
    check_groups(state, saved["optimizer"]["groups"])
    there, here = saved["scheduler"], live["scheduler"]
    _same("learning-rate scheduler", there and there["class"], here and here["class"])
    _same("loss scaler", saved["loss_scaler"]["kind"], live["loss_scaler"]["kind"])


def install_extra(engine: Engine, state: ShardedState, saved: Mapping[str, Json]) -> None:
    """All of `read_extra` but the optimizer's scalars, which go in with the tensors."""
    install_groups([state.base.param_groups, *state.group_holders().values()], saved["optimizer"]["groups"])
    engine.load_extra_state(saved)


def _same(what: str, stored: str | None, live: str | None) -> None:
    if stored != live:
        raise ModelMismatch(f"the checkpoint's {what} is {stored or 'none'}, this engine's is {live or 'none'}")

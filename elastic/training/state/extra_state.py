"""What is equal on all ranks and is no tensor: counters, loss scaler, scheduler, hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import ModelMismatch
from elastic.engines.inventory import Inventory
from elastic.engines.json_values import decode, encode
from elastic.engines.live_state import Stage, members
from elastic.engines.optimizer_state import check_groups, encode_scalars, install_groups, read_groups

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# What a scaler has learned. Its settings (window, factor, minimum) come from the configuration.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def read_client(engine: Any, stage: Stage, inventory: Inventory, caller: Mapping[str, Json]) -> dict[str, Json]:
    """JSON of everything but the tensors; `caller` comes back unchanged from a restore.

    Raises UsageError for a scheduler or an optimizer that keeps what JSON cannot hold.
    """
    return {
        "engine": {name: int(getattr(engine, name)) for name in COUNTERS},
        "optimizer": {
            "class": type(stage.base).__name__,
            "groups": read_groups(stage),
            "scalars": encode_scalars(list(inventory.masters), list(inventory.states)),
        },
        "loss_scaler": read_scaler(engine),
        "scheduler": read_scheduler(engine),
        "fleeting_buffers": [member.name for member in members(engine.module, ()) if not member.persistent],
        "caller": dict(caller),
    }


def check_client(engine: Any, stage: Stage, client: Mapping[str, Json]) -> None:
    """Raises ModelMismatch where the checkpoint's optimizer, groups, scheduler or loss scaler are of another kind."""
    _same("optimizer", client["optimizer"]["class"], type(stage.base).__name__)
    check_groups(stage, client["optimizer"]["groups"])
    scheduler = engine.lr_scheduler
    stored = client["scheduler"]
    _same("learning-rate scheduler", stored and stored["class"], scheduler and type(scheduler).__name__)
    _same("loss scaler", client["loss_scaler"]["kind"], read_scaler(engine)["kind"])


def install_client(engine: Any, stage: Stage, client: Mapping[str, Json]) -> None:
    """Everything of `read_client` but the optimizer's scalars, which go in with the tensors."""
    wrapper = engine.optimizer
    optimizers = (stage.base, wrapper, engine.basic_optimizer, getattr(wrapper, "backup_optimizer", None))
    install_groups(optimizers, client["optimizer"]["groups"])
    _install_scaler(engine, client["loss_scaler"])
    if client["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(decode(client["scheduler"]["state"]))
    for name, value in counters_of(engine, client).items():
        setattr(engine, name, value)


def counters_of(engine: Any, client: Mapping[str, Json]) -> dict[str, int]:
    """The engine's counters as they must be here after a restore."""
    counters = {name: int(client["engine"][name]) for name in COUNTERS}
    if engine.managed_gradient_accumulation():
        # Micro-steps per step change with the world size, and the next step must begin at a boundary of the new number.
        counters["micro_steps"] = counters["global_steps"] * engine.gradient_accumulation_steps()
    return counters


def _same(what: str, stored: str | None, live: str | None) -> None:
    if stored != live:
        raise ModelMismatch(f"the checkpoint's {what} is {stored or 'none'}, this engine's is {live or 'none'}")


def read_scheduler(engine: Any) -> Json:
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return None
    name = type(scheduler).__name__
    state = encode(dict(scheduler.state_dict()), f"the state of learning-rate scheduler {name}")
    return {"class": name, "state": state}


def read_scaler(engine: Any) -> Json:
    autocast = _autocast_scaler(engine)
    if autocast is not None:
        return {"kind": "autocast", "values": encode(dict(autocast.state_dict()), "the state of the gradient scaler")}
    scaler = _scaler(engine)
    if scaler is None:
        return {"kind": "none", "values": {}}
    dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    if not dynamic and scaler.cur_scale == 1:
        # DeepSpeed gives fp32 and bf16 a scaler that scales nothing, in some stages only.
        return {"kind": "none", "values": {}}
    values = {name: encode(getattr(scaler, name), name) for name in _SCALER if getattr(scaler, name, None) is not None}
    return {"kind": "dynamic" if dynamic else "static", "values": values}


def _install_scaler(engine: Any, stored: Json) -> None:
    values = decode(stored["values"])
    autocast = _autocast_scaler(engine)
    if autocast is not None:
        autocast.load_state_dict(values)
        return
    scaler = _scaler(engine)
    for name, value in values.items():
        setattr(scaler, name, value)


def _scaler(engine: Any) -> Any:
    """`loss_scaler` in ZeRO's wrappers, `loss_scale_config` in those of stage 0; others have none."""
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)


def _autocast_scaler(engine: Any) -> Any:
    own = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return own or getattr(engine, "torch_autocast_z0_gradscaler", None)

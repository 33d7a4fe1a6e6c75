"""What is equal on all ranks and is neither a tensor nor the optimizer's: counters, loss scaler, scheduler, modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.checkpoint.manifest import Json
from elastic.engines.deepspeed.monitors import continue_csv
from elastic.engines.json_values import decode, encode
from elastic.engines.model.extra_state import install_modules, read_modules

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# What a scaler has learned. Its settings (window, factor, minimum) come from the configuration.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def read(engine: Any) -> dict[str, Json]:
    """See `Engine.extra_state`."""
    return {
        "engine": {name: int(getattr(engine, name)) for name in COUNTERS},
        "loss_scaler": read_scaler(engine),
        "scheduler": read_scheduler(engine),
        "modules": read_modules(engine.module),
    }


def install(engine: Any, saved: Mapping[str, Json]) -> None:
    """See `Engine.load_extra_state`."""
    install_scaler(engine, saved["loss_scaler"])
    install_modules(engine.module, saved.get("modules"))
    if saved["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(decode(saved["scheduler"]["state"]))
    for name, value in counters_of(engine, saved).items():
        setattr(engine, name, value)
    continue_csv(engine, engine.global_samples)


def counters_of(engine: Any, saved: Mapping[str, Json]) -> dict[str, int]:
    """The engine's counters as they must be here after a restore."""
    counters = {name: int(saved["engine"][name]) for name in COUNTERS}
    if engine.managed_gradient_accumulation():
        # Micro-steps per step change with the world size, and the next step must begin at a boundary of the new number.
        counters["micro_steps"] = counters["global_steps"] * engine.gradient_accumulation_steps()
    return counters


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
    scaler = scaler_of(engine)
    if scaler is None:
        return {"kind": "none", "values": {}}
    dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    if not dynamic and scaler.cur_scale == 1:
        # DeepSpeed gives fp32 and bf16 a scaler that scales nothing, in some stages only.
        return {"kind": "none", "values": {}}
    values = {name: encode(getattr(scaler, name), name) for name in _SCALER if getattr(scaler, name, None) is not None}
    return {"kind": "dynamic" if dynamic else "static", "values": values}


def install_scaler(engine: Any, stored: Json) -> None:
    values = decode(stored["values"])
    autocast = _autocast_scaler(engine)
    if autocast is not None:
        autocast.load_state_dict(values)
        return
    scaler = scaler_of(engine)
    for name, value in values.items():
        setattr(scaler, name, value)


def scaler_of(engine: Any) -> Any:
    """`loss_scaler` in ZeRO's wrappers, `loss_scale_config` in those of stage 0; others have none."""
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)


def _autocast_scaler(engine: Any) -> Any:
    own = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return own or getattr(engine, "torch_autocast_z0_gradscaler", None)

"""What rank 0 saves besides tensors, compared with the objects that own it; verification reads them by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from elastic.core.checkpoint.manifest import Json
from elastic.engines import saved_numbers
from elastic.engines.deepspeed.state.fragments import numbers, stepping
from elastic.engines.json_values import decode
from elastic.engines.model.extra_state import read_modules

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def wrong_numbers(engine: Any, saved: Mapping[str, Json], names: Collection[str] | None) -> list[str]:
    """What is otherwise in `saved` than in the engine. Optimizer scalars are looked at for `names`, or all."""
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    groups, scheduler = stepping(engine).param_groups, engine.lr_scheduler
    wrong = saved_numbers.wrong_numbers(saved, counters, scheduler, groups, numbers(engine, names))
    return wrong if _same_scaler(engine, saved["loss_scaler"]) else ["loss scaler", *wrong]


def expected_numbers(engine: Any, saved: Mapping[str, Json]) -> dict[str, Json]:
    """See `Engine.expected_extra_state`."""
    counters = {name: saved["engine"][name] for name in _COUNTERS}
    # DeepSpeed steps the optimizer where this is a multiple of the micro-steps in a step, unless it is told each time.
    if engine.managed_gradient_accumulation():
        counters["micro_steps"] = saved["engine"]["global_steps"] * engine.gradient_accumulation_steps()
    return {
        "engine": counters,
        "loss_scaler": saved["loss_scaler"],
        "scheduler": saved["scheduler"],
        "modules": saved.get("modules", read_modules(engine.module)),
    }


def _same_scaler(engine: Any, stored: Mapping[str, Json]) -> bool:
    wrapper, values = engine.optimizer, decode(stored["values"])
    for owner, name in ((wrapper, "torch_autocast_gradscaler"), (engine, "torch_autocast_z0_gradscaler")):
        if getattr(owner, name, None) is not None:
            return bool(values == getattr(owner, name).state_dict())
    scaler = getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)
    if stored["kind"] == "none":
        return scaler is None or scaler.cur_scale == 1
    return "cur_scale" in values and all(getattr(scaler, name) == value for name, value in values.items())

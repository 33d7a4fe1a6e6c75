"""What rank 0 saves besides tensors, compared with the objects that own it; verification reads them by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from elastic.core.checkpoint.manifest import Json
from elastic.engines.deepspeed.module_extra import read_modules
from elastic.engines.deepspeed.state.fragments import numbers, stepping
from elastic.engines.json_values import decode, encode

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# Written by torch into parameter groups; not part of the training state.
_IGNORED = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def wrong_numbers(engine: Any, saved: Mapping[str, Json], names: Collection[str] | None) -> list[str]:
    """What is otherwise in `saved` than in the engine. Optimizer scalars are looked at for `names`, or all."""
    wrong = [name for name in _COUNTERS if saved["engine"].get(name) != getattr(engine, name)]
    if not _same_scaler(engine, saved["loss_scaler"]):
        wrong.append("loss scaler")
    if not _same_scheduler(engine.lr_scheduler, saved["scheduler"]):
        wrong.append("learning-rate scheduler")
    groups = saved["optimizer"]["groups"]
    wrong += [
        f"hyper-parameters of group {number}"
        for number, group in enumerate(stepping(engine).param_groups)
        if number >= len(groups) or not _same_values(groups[number]["hyper"], _without(group, _IGNORED))
    ]
    stored = {name: entry["values"] for entry in saved["optimizer"]["scalars"] for name in entry["names"]}
    live = numbers(engine, names)
    return wrong + [
        f"optimizer scalars of {name}"
        for name, values in live.items()
        if not _same_values(stored.get(name, {}), values)
    ]


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


def _same_scheduler(scheduler: Any, stored: Json) -> bool:
    if scheduler is None or stored is None:
        return scheduler is None and stored is None
    return bool(stored["state"] == encode(dict(scheduler.state_dict()), ""))


def _same_values(stored: Mapping[str, Json], live: Mapping[str, Any]) -> bool:
    return stored.keys() == live.keys() and all(stored[key] == encode(value, "") for key, value in live.items())


def _without(group: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}

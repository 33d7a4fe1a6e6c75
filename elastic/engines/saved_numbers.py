"""What rank 0 is about to save besides tensors, compared with the objects that own it: the part that engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.core.checkpoint.manifest import Json
from elastic.engines.json_values import encode

# Written by torch into parameter groups; not part of the training state.
_IGNORED = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def wrong_numbers(
    saved: Mapping[str, Json],
    counters: Mapping[str, int],
    scheduler: Any,
    groups: Sequence[Mapping[str, Any]],
    scalars: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """What is otherwise in `saved` than in the engine: its counters, its scheduler, the groups of the optimizer that
    steps, and the `scalars` that this optimizer keeps of each parameter by name."""
    wrong = [name for name, value in counters.items() if saved["engine"].get(name) != value]
    if not _same_scheduler(scheduler, saved["scheduler"]):
        wrong.append("learning-rate scheduler")
    stored_groups = saved["optimizer"]["groups"]
    wrong += [
        f"hyper-parameters of group {number}"
        for number, group in enumerate(groups)
        if number >= len(stored_groups) or not _same_values(stored_groups[number]["hyper"], _own(group))
    ]
    stored = {name: entry["values"] for entry in saved["optimizer"]["scalars"] for name in entry["names"]}
    return wrong + [
        f"optimizer scalars of {name}"
        for name, values in scalars.items()
        if not _same_values(stored.get(name, {}), values)
    ]


def _same_scheduler(scheduler: Any, stored: Json) -> bool:
    if scheduler is None or stored is None:
        return scheduler is None and stored is None
    return bool(stored["state"] == encode(dict(scheduler.state_dict()), ""))


def _same_values(stored: Mapping[str, Json], live: Mapping[str, Any]) -> bool:
    return stored.keys() == live.keys() and all(stored[key] == encode(value, "") for key, value in live.items())


def _own(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IGNORED}

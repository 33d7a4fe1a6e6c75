"""Verification after a restore of step counts, hyper-parameters, loss scaler, scheduler and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.engines.inventory import Inventory
from elastic.engines.json_values import decode, encode
from elastic.engines.live_state import ShardedState


@dataclass(frozen=True)
class LiveGroups:
    """The parameter groups' own dicts by holder: learning rates are written into these and read from these."""

    held: tuple[tuple[str, tuple[dict[str, Any], ...]], ...]

    @classmethod
    def of(cls, state: ShardedState) -> LiveGroups:
        return cls(tuple((who, tuple(groups)) for who, groups in state.group_holders().items()))

    def moved(self, later: LiveGroups) -> list[str]:
        """The holders that have other dicts in `later`."""
        return [
            who
            for (who, before), (_, after) in zip(self.held, later.held, strict=True)
            if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True))
        ]


def wrong_scalars(inventory: Inventory, saved: Mapping[str, Json]) -> set[str]:
    """Names of parameters whose step count (or other number) is not the saved one, or is shared with another tensor."""
    stored = {name: entry["values"] for entry in saved["optimizer"]["scalars"] for name in entry["names"]}
    wrong: set[str] = set()
    owners: dict[int, tuple[str, ...]] = {}
    for master, state in zip(inventory.masters, inventory.states, strict=True):
        found = {key: encode(value, key) for key, value in state.scalars.items()}
        saved_with = [name for name in master.names if name in stored]
        # Every name for itself: which of them an install goes by is its own affair.
        wrong.update(name for name in saved_with if dict(stored[name]) != found)
        if found and not saved_with:
            wrong.update(master.names)
        for value in state.scalars.values():
            # One count that two tensors share would go up twice a step.
            if (
                isinstance(value, torch.Tensor)
                and owners.setdefault(value.data_ptr(), master.names) is not master.names
            ):
                wrong.update(master.names)
    return wrong


def wrong_groups(base: torch.optim.Optimizer, saved: Mapping[str, Json]) -> set[int]:
    """Numbers of the parameter groups with another hyper-parameter than saved."""
    stored: Sequence[Json] = saved["optimizer"]["groups"]
    return {
        number
        for number, (group, entry) in enumerate(zip(base.param_groups, stored, strict=True))
        if any(key not in group or not _same(group[key], value) for key, value in entry["hyper"].items())
    }


def wrong_rest(live: Mapping[str, Json], expected: Mapping[str, Json]) -> dict[str, bool]:
    """For each part of an engine's extra state: is it otherwise than expected?"""
    wrong = {name: live["engine"].get(name) != value for name, value in expected["engine"].items()}
    wrong["loss scaler"] = not _within(expected["loss_scaler"], live["loss_scaler"])
    wrong["extra state of modules"] = expected.get("modules") != live.get("modules")
    wrong["learning-rate scheduler"] = expected["scheduler"] != live["scheduler"]
    return wrong


def _same(live: Any, stored: Json) -> bool:
    """A rate that lives in a tensor has the tensor's precision."""
    if isinstance(live, torch.Tensor):
        return bool(torch.equal(live, torch.full_like(live, float(decode(stored)))))
    return bool(encode(live, "") == stored)


def _within(stored: Json, live: Json) -> bool:
    """A scaler may know more than was saved; what was saved it must know."""
    kept = {name: live["values"].get(name) for name in stored["values"]}
    return bool(stored["kind"] == live["kind"] and kept == stored["values"])

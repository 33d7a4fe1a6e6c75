"""After a restore: are step counts, hyper-parameters, scaler, scheduler and counters as they were saved?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.engines.inventory import Inventory
from elastic.engines.json_values import decode, encode
from elastic.engines.live_state import Stage
from elastic.engines.optimizer_state import decode_scalars, scalars_of
from elastic.training.state.extra_state import COUNTERS, counters_of, read_scaler, read_scheduler


@dataclass(frozen=True)
class LiveGroups:
    """The parameter groups' own dicts, by who holds on to them: rates are written into these and read from these."""

    held: tuple[tuple[str, tuple[dict[str, Any], ...]], ...]

    @classmethod
    def of(cls, engine: Any) -> LiveGroups:
        wrapper, scheduler = engine.optimizer, engine.lr_scheduler
        holders = {
            "the engine's optimizer": wrapper,
            "the optimizer that steps": getattr(wrapper, "optimizer", None),
            "the optimizer that was given": engine.basic_optimizer,
            "the scheduler": getattr(scheduler, "optimizer", None),
        }
        return cls(tuple((who, tuple(getattr(holder, "param_groups", ()))) for who, holder in holders.items()))

    def moved(self, later: LiveGroups) -> list[str]:
        """Who holds other dicts in `later`."""
        return [
            who
            for (who, before), (_, after) in zip(self.held, later.held, strict=True)
            if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True))
        ]


def wrong_scalars(inventory: Inventory, client: Mapping[str, Json]) -> set[str]:
    """Names of parameters whose step count (or other number) is not the saved one, or is shared with another tensor."""
    by_name = decode_scalars(client["optimizer"]["scalars"])
    wrong: set[str] = set()
    owners: dict[int, tuple[str, ...]] = {}
    for master, state in zip(inventory.masters, inventory.states, strict=True):
        found = {key: encode(value, key) for key, value in state.scalars.items()}
        if found != dict(scalars_of(master, by_name) or {}):
            wrong.update(master.names)
        for value in state.scalars.values():
            # One count for two tensors would go up twice a step.
            if (
                isinstance(value, torch.Tensor)
                and owners.setdefault(value.data_ptr(), master.names) is not master.names
            ):
                wrong.update(master.names)
    return wrong


def wrong_groups(stage: Stage, client: Mapping[str, Json]) -> set[int]:
    """Numbers of the parameter groups with another hyper-parameter than saved."""
    stored: Sequence[Json] = client["optimizer"]["groups"]
    return {
        number
        for number, (group, entry) in enumerate(zip(stage.base.param_groups, stored, strict=True))
        if any(key not in group or not _same(group[key], value) for key, value in entry["hyper"].items())
    }


def wrong_rest(engine: Any, client: Mapping[str, Json]) -> set[str]:
    """Of `REST`, what is not as saved."""
    wrong = {name for name, value in counters_of(engine, client).items() if getattr(engine, name) != value}
    if not _within(client["loss_scaler"], read_scaler(engine)):
        wrong.add("loss scaler")
    if client["scheduler"] != read_scheduler(engine):
        wrong.add("learning-rate scheduler")
    return wrong


REST = (*COUNTERS, "loss scaler", "learning-rate scheduler")


def _same(live: Any, stored: Json) -> bool:
    """A rate that lives in a tensor has the tensor's precision."""
    if isinstance(live, torch.Tensor):
        return bool(torch.equal(live, torch.full_like(live, float(decode(stored)))))
    return bool(encode(live, "") == stored)


def _within(stored: Json, live: Json) -> bool:
    """A scaler may know more than was saved; what was saved it must know."""
    kept = {name: live["values"].get(name) for name in stored["values"]}
    return bool(stored["kind"] == live["kind"] and kept == stored["values"])

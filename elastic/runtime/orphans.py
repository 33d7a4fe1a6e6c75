"""Removes a run's leftovers from the cluster: parts of an attempt whose controller is gone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from elastic.runtime import names

logger = logging.getLogger(__name__)


def remove_orphans(run_id: str, keep: Collection[str] = ()) -> tuple[str, ...]:
    """Kill every named actor and remove every placement group of the run except its controller and the names in `keep`.
    Returns the names of all that were removed.

    Blocks on Ray's control store: not for the event loop.
    """
    prefix = names.parts(run_id)
    found: list[str] = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == names.NAMESPACE and name.startswith(prefix) and name not in keep:
            found.append(name)
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(name, names.NAMESPACE), no_restart=True)
    for identity, group in _groups().items():
        name = group["name"]
        if name.startswith(prefix) and name not in keep and group["state"] != "REMOVED":
            found.append(name)
            ray.util.remove_placement_group(_handle(identity))
    if found:
        logger.info("removed %d leftovers of run %s", len(found), run_id)
    return tuple(found)


def _groups() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return table


def _handle(identity: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity)))

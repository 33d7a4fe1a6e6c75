"""Check that a checkpoint is of this model: names, shapes and roles, compared before any of its tensors is read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import ModelMismatch
from elastic.engines.live_state import BUFFER, KEPT, MASTER, PARAM, TensorSpec

_ROLES = {MASTER: "trained", PARAM: "frozen", BUFFER: "a buffer"}
_log = logging.getLogger(__name__)


def check_model(manifest: Manifest, specs: Iterable[TensorSpec], fleeting: Collection[str]) -> frozenset[str]:
    """Names that are not restored: buffers outside the state_dict that differ or exist on one side only.

    Those are caches that the module fills by itself (position tables that grow with the input); `fleeting` names the
    checkpoint's. Any other difference raises ModelMismatch naming the first differing tensor, in the model's order.
    """
    live = {spec.name: spec for spec in specs}
    skipped = set()
    for name, spec in live.items():
        difference = _difference(manifest, spec)
        if difference and spec.persistent:
            raise ModelMismatch(f"the checkpoint is of another model: {difference}")
        if difference:
            _log.warning("non-persistent buffer %s is left as it is: %s", name, difference)
            skipped.add(name)
    for name in manifest.parameters:
        if name in live or f"{KEPT}/{name}" in manifest.digests:
            continue
        if name not in fleeting:
            raise ModelMismatch(f"the checkpoint is of another model: it has {name!r}, this model has not")
        _log.warning("non-persistent buffer %s of the checkpoint does not exist in this model and is left out", name)
        skipped.add(name)
    return frozenset(skipped)


def _difference(manifest: Manifest, spec: TensorSpec) -> str | None:
    name = spec.name
    if name not in manifest.parameters:
        return f"this model has {name!r}, the checkpoint has not"
    shape = tuple(manifest.parameters[name])
    if shape != spec.shape:
        return f"{name!r} has shape {spec.shape} here, {shape} in the checkpoint"
    roles = [role for role in _ROLES if f"{role}/{name}" in manifest.digests]
    if spec.numel and roles != [spec.kind]:
        there = " and ".join(_ROLES[role] for role in roles) or "without content"
        return f"{name!r} is {_ROLES[spec.kind]} here, {there} in the checkpoint"
    return None

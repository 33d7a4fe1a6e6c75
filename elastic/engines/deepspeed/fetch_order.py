"""The order in which ZeRO stage 3 fetches weights, which DeepSpeed records in a pass and goes by in later ones.

A module that uses the weight of another is found when it does so, and fetches that weight by itself from then on. In an
order that was recorded before, it does not: the next pass that begins as the recorded one fails ("tracing error",
RuntimeError, seen with DeepSpeed 0.19.8 where text is generated, and then scored by the head's weight without
gradients). So no pass goes by an order from before such a find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Weights(dict[int, Any]):
    """Of a module: those of others that it fetches."""

    def __init__(self, known: dict[int, Any], found: Callable[[], None]) -> None:
        super().__init__(known)
        self._found = found

    def __setitem__(self, key: int, weight: Any) -> None:
        if key not in self:
            self._found()
        super().__setitem__(key, weight)


def forget_where_weights_are_found(offload: Any) -> None:
    """`offload`: the DeepSpeedZeRoOffload of an engine that was just built."""
    coordinator = offload.get_param_coordinator()
    begin, found = coordinator.reset_step, False

    def find() -> None:
        nonlocal found
        found = True

    def reset_step() -> None:
        nonlocal found
        if found and coordinator.is_complete_trace():
            coordinator._invalidate_trace()
        found = False
        begin()

    for module in offload.module.modules():
        module._external_params = _Weights(module._external_params, find)
    coordinator.reset_step = reset_step

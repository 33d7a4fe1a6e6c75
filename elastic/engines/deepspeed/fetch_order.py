"""The order in which ZeRO stage 3 fetches weights, which DeepSpeed records in a pass and goes by in later ones.

A module that uses the weight of another is found when it does so, and fetches that weight by itself from then on. In an
order that was recorded before, it does not: the next pass that begins as the recorded one fails ("tracing error",
RuntimeError, seen with DeepSpeed 0.19.8 where text is generated, and then scored by the head's weight without
gradients). So no pass goes by an order from before such a find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What a coordinator does for a module's pass, and the answer that does nothing.
_OF_PASSES: dict[str, Any] = {
    "reset_step": None, "trace_prologue": None, "is_record_trace": False, "fetch_sub_module": None,
    "release_sub_module": None,
}  # fmt: skip


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


@contextmanager
def fetched_at_once(offload: Any) -> Iterator[None]:
    """All weights are whole while the body runs, in whose passes, without gradients, none is fetched or released.
    Collective at its beginning."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    known = vars(offload.get_param_coordinator())
    with GatheredParameters(list(offload.module.parameters())):
        before = {name: known[name] for name in _OF_PASSES if name in known}
        known.update({name: _answering(value) for name, value in _OF_PASSES.items()})
        try:
            yield
        finally:
            for name in _OF_PASSES:
                del known[name]
            known.update(before)


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value

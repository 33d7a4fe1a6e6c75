"""What an optimizer's update is made with, changed around the update alone, so that its scheduler does not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def scaled_rates(groups: Iterable[dict[str, Any]], factor: float) -> Iterator[None]:
    """Learning rates times `factor`."""
    before = [(group, group["lr"]) for group in groups if "lr" in group] if factor != 1.0 else []
    for group, rate in before:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in before:
            group["lr"] = rate


@contextmanager
def updating(optimizer: Any, update: Callable[..., Any]) -> Iterator[None]:
    """The optimizer's `step` is `update`."""
    own = vars(optimizer)
    had, before = "step" in own, own.get("step")

    def step(*args: Any, **kwargs: Any) -> Any:
        return update(*args, **kwargs)

    # Marks by which torch's schedulers tell that the optimizer goes first.
    step._wrapped_by_lr_sched = optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.step = step
    try:
        yield
    finally:
        if had:
            optimizer.step = before
        else:
            del optimizer.step

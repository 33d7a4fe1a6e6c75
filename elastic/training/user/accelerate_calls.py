"""accelerate in a script whose loop is the platform's: what it knows of the process, and its own checkpoints.

It looks at rank and world size once for the process, and once for each DataLoader that it shares out.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from elastic.core.errors import UsageError
from elastic.engines import foreign_loops
from elastic.engines.when_imported import when_imported
from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

# Of the present generation; None without one.
_engine: Callable[[], Any] | None = None
# What accelerate has made to share a DataLoader's batches, or an iterable's items, out among the ranks.
_shares: weakref.WeakSet[Any] = weakref.WeakSet()
# It has been given a DataLoader by a process that trained alone, and has left it whole.
_whole = False

_LEFT_WHOLE = (
    "accelerate has left a DataLoader whole while one worker trained alone; with others it would be evaluated by each"
)


def joined(rank: int, world_size: int, engine: Callable[[], Any]) -> None:
    """A generation begins: `engine` gives the one of `elastic.initialize`, or None before. What accelerate knows is
    that of the generation before: it would gather from ranks that are not there any more, take rank 0 for another one,
    and evaluate samples twice, or not at all. Raises UsageError where a batch cannot be cut for `world_size` ranks."""
    global _engine, _whole
    _engine, _whole = engine, False
    state = sys.modules.get("accelerate.state")
    if state is None:
        return
    known = state.PartialState._shared_state
    before = (known.get("num_processes"), known.get("process_index"))
    for shared in (known, state.AcceleratorState._shared_state):
        # A process that trains alone, by accelerate's own rules, gathers nothing.
        if shared and shared.get("distributed_type") != state.DistributedType.NO:
            shared.update(num_processes=world_size, process_index=rank)
    for share in _shares:
        if (share.num_processes, share.process_index) == before:
            _require_whole_parts(share, world_size)
            share.num_processes, share.process_index = world_size, rank


def began() -> None:
    """The engine is there: is the function to be called again for another generation?"""
    engine = None if _engine is None else _engine()
    if _whole and engine is not None and "accelerate" not in engine.followers:
        engine.begin_again(_LEFT_WHOLE)


def _require_whole_parts(share: Any, world_size: int) -> None:
    if share.split_batches and (share.batch_size or 0) % world_size:
        raise UsageError(
            f"accelerate with split_batches cuts each batch of {share.batch_size} into as many parts as there are "
            f"workers, and there are {world_size} now: leave split_batches out"
        )


def left() -> None:
    global _engine
    _engine = None


def _save_state(accelerator: Any, output_dir: Any = None, *_: Any, **__: Any) -> Any:
    """It has no model and no optimizer to save: they were not prepared. Returns `output_dir`, as accelerate's."""
    engine = None if _engine is None else _engine()
    if engine is None:
        raise UsageError("accelerator.save_state was called before elastic.initialize: there is no state to save yet")
    warn_once(
        logger,
        "accelerator.save_state: the platform saves this step to its own storage, in its own format, as "
        "engine.save_checkpoint does; the folder stays as it is",
    )
    engine.save_checkpoint(output_dir)
    return output_dir


def _load_state(accelerator: Any, *_: Any, **__: Any) -> None:
    warn_once(
        logger,
        "accelerator.load_state: nothing is loaded, elastic.initialize restores the newest checkpoint of the run; "
        "start another run from one with `elastic resume RUN`",
    )


def _noted(module: Any) -> None:
    """Wraps what shares out, in `accelerate.data_loader`; once per process."""
    for name in ("BatchSamplerShard", "IterableDatasetShard"):
        made: Any = getattr(module, name)
        made.__init__ = _noting(made.__init__)
    looking = module.prepare_data_loader = _looking(module.prepare_data_loader)
    if (loaded := sys.modules.get("accelerate.accelerator")) is not None:
        loaded.prepare_data_loader = looking  # type: ignore[attr-defined]


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _shares.add(self)

    return init


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        global _whole
        prepared = original(*args, **kwargs)
        state = sys.modules["accelerate.state"].PartialState()
        _whole = _whole or state.num_processes == 1
        began()
        return prepared

    return prepare_data_loader


when_imported("accelerate.data_loader", _noted)
for _method, _answer in {"save_state": _save_state, "load_state": _load_state}.items():
    foreign_loops.answer("accelerate.accelerator", "Accelerator", _method, _answer)

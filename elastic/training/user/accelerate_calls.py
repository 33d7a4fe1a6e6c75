"""accelerate in a script whose loop is the platform's: what it knows of the process, and its own checkpoints.

It looks at rank and world size once for the process, and once for each DataLoader that it shares out. Of ranks that
train on the same samples (`core.mesh`), each is given the same ones of an evaluation, which are gathered once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, described
from elastic.engines import foreign_loops
from elastic.engines.when_imported import when_imported
from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

# Of the present generation; None without one.
_engine: Callable[[], Any] | None = None
# Its ranks that train on the same samples, of whom each cell has as many.
_mesh = Mesh(1)
# What accelerate has made to share a DataLoader's batches, or an iterable's items, out among the ranks.
_shares: weakref.WeakSet[Any] = weakref.WeakSet()
# It has been given a DataLoader by a process that trained alone, and has left it whole.
_whole = False
# What is gathered now is to have each sample once.
_for_metrics = False

_LEFT_WHOLE = (
    "accelerate has left a DataLoader whole while one worker trained alone; with others it would be evaluated by each"
)


def joined(rank: int, mesh: Mesh, engine: Callable[[], Any]) -> None:
    """A generation begins: `engine` gives the one of `elastic.initialize`, or None before. What accelerate knows is
    that of the generation before: it would gather from ranks that are not there any more, take rank 0 for another one,
    and evaluate samples twice, or not at all. Raises UsageError where a batch cannot be cut for all that have one."""
    global _engine, _mesh, _whole
    _engine, _mesh, _whole = engine, mesh, False
    state = sys.modules.get("accelerate.state")
    if state is None:
        return
    for shared in (state.PartialState._shared_state, state.AcceleratorState._shared_state):
        # A process that trains alone, by accelerate's own rules, gathers nothing.
        if shared and shared.get("distributed_type") != state.DistributedType.NO:
            shared.update(num_processes=mesh.dp * mesh.per_cell, process_index=rank)
    for share in _shares:
        _require_whole_parts(share)
        share.num_processes, share.process_index = mesh.dp, mesh.data(rank)


def expect(mesh: Mesh) -> None:
    """That of the generation that this process will join: it has been told its place there."""
    global _mesh
    _mesh = mesh


def began() -> None:
    """The engine is there: is the function to be called again for another generation?"""
    engine = None if _engine is None else _engine()
    if _whole and engine is not None and "accelerate" not in engine.followers:
        engine.begin_again(_LEFT_WHOLE)


def _require_whole_parts(share: Any) -> None:
    if share.split_batches and (share.batch_size or 0) % _mesh.dp:
        apart = "workers" if _mesh.per_cell == 1 else "cells of workers"
        raise UsageError(
            f"accelerate with split_batches cuts each batch of {share.batch_size} into as many parts as there are "
            f"{apart}, and there are {_mesh.dp} now: leave split_batches out"
        )


def left() -> None:
    global _engine, _mesh
    _engine, _mesh = None, Mesh(1)


def save_state(accelerator: Any, output_dir: Any = None, *_: Any, **__: Any) -> Any:
    """It has no model and no optimizer to save: they were not prepared. Returns `output_dir`, as accelerate's."""
    engine = None if _engine is None else _engine()
    if engine is None:
        raise UsageError("accelerator.save_state was called before elastic.initialize: there is no state to save yet")
    warn_once(
        logger,
        "accelerator.save_state: the platform saves this step to its own storage, in its own format, as "
        "engine.save_checkpoint does; the folder is there, and stays empty",
    )
    if output_dir is not None:
        # Scripts put files of their own beside.
        os.makedirs(output_dir, exist_ok=True)
    engine.save_checkpoint(output_dir)
    return output_dir


def load_state(accelerator: Any, *_: Any, **__: Any) -> None:
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
        # Not the script's own figures.
        if (self.num_processes, self.process_index) == _place():
            _shares.add(self)

    return init


def _place() -> tuple[int, int]:
    """Among how many accelerate shares data out, and which of these this rank is. (0, 0): it has not asked yet."""
    known = sys.modules["accelerate.state"].PartialState._shared_state
    return known.get("num_processes", 0) // _mesh.per_cell, known.get("process_index", 0) // _mesh.per_cell


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        global _whole
        given = signature.bind(*args, **kwargs)
        if _mesh.per_cell > 1:
            _of_cells(given.arguments)
        prepared = original(*given.args, **given.kwargs)
        _whole = _whole or _place()[0] == 1
        began()
        return prepared

    return prepare_data_loader


def _of_cells(arguments: dict[str, Any]) -> None:
    """The arguments of `prepare_data_loader`, where ranks of a cell are to have the same samples."""
    if arguments.get("dispatch_batches"):
        raise UsageError(
            "accelerate with dispatch_batches gives each worker other samples, and here several train on the same "
            f"ones ({described(_mesh.sp, _mesh.tp, pp=_mesh.pp)}): leave dispatch_batches out"
        )
    arguments["dispatch_batches"] = False
    state = sys.modules["accelerate.state"].PartialState()
    named = [arguments.get(name) for name in ("num_processes", "process_index")]
    if named in ([None, None], [state.num_processes, state.process_index]):
        arguments["num_processes"], arguments["process_index"] = _place()


def _once(module: Any) -> None:
    """`gather_for_metrics` has each sample once: what one rank of each cell has found."""
    kind = module.Accelerator
    kind.gather_for_metrics = _gathering(kind.gather_for_metrics)
    module.gather, module.gather_object = _of_first(module.gather), _from_first(module.gather_object)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_for_metrics(*args: Any, **kwargs: Any) -> Any:
        global _for_metrics
        _for_metrics = _mesh.per_cell > 1
        try:
            return original(*args, **kwargs)
        finally:
            _for_metrics = False

    return gather_for_metrics


def _of_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather(tensor: Any) -> Any:
        gathered = original(tensor)
        if not _for_metrics:
            return gathered
        return sys.modules["accelerate.utils"].recursively_apply(_first_of_cells, gathered)

    return gather


def _first_of_cells(gathered: torch.Tensor) -> torch.Tensor:
    """[ranks * n, ...] -> [cells * n, ...]"""
    of_rank = len(gathered) // (_mesh.dp * _mesh.per_cell)
    return gathered.reshape(_mesh.dp, _mesh.per_cell, of_rank, *gathered.shape[1:])[:, 0].flatten(0, 1)


def _from_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate puts the lists of all ranks together, of any length."""

    @functools.wraps(original)
    def gather_object(value: Any) -> Any:
        leaves_out = _for_metrics and sys.modules["accelerate.state"].PartialState().process_index % _mesh.per_cell
        return original([] if leaves_out else value)

    return gather_object


when_imported("accelerate.data_loader", _noted)
when_imported("accelerate.accelerator", _once, "each sample once")
for _method, _answer in {"save_state": save_state, "load_state": load_state}.items():
    foreign_loops.answer("accelerate.accelerator", "Accelerator", _method, _answer)

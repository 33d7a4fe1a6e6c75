"""DeepSpeed's own entry points when user code calls them inside of a generation.

`deepspeed.initialize` is answered by `elastic.initialize`: an engine that the platform does not know would train, and
nothing of it would be saved or counted. `deepspeed.zero.Init` is given the configuration of this world size: with the
user's, DeepSpeed ends the process where the world size does not divide the global batch.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh
from elastic.engines.deepspeed.experts import native
from elastic.engines.deepspeed.pipeline import placed as pipeline

logger = logging.getLogger(__name__)

# What user calls become; None outside of a generation. One generation at a time: plain module state.
_initialize: Callable[..., Any] | None = None
_resolve: Callable[[Any], Any] | None = None
_mesh: Callable[[], Mesh] | None = None
_engines_own: Callable[[], AbstractContextManager[None]] = nullcontext
_building = False


def answer(
    initialize: Callable[..., Any] | None,
    resolve: Callable[[Any], Any] | None,
    mesh: Callable[[], Mesh] | None = None,
    engines_own: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """From now on `deepspeed.initialize` is `initialize`, zero.Init's configuration goes through `resolve`, and a
    PipelineModule or a MoE layer is built for `mesh()`, within `engines_own()`.

    None for all: DeepSpeed's own again.
    """
    global _initialize, _resolve, _mesh, _engines_own
    _install()
    _initialize, _resolve, _mesh, _engines_own = initialize, resolve, mesh, engines_own


def mesh() -> Mesh:
    """Of the present generation."""
    assert _mesh is not None
    return _mesh()


class _AwaitedGroup:
    """In the place of `deepspeed.comm`'s backend while the process has no group: what needs the group waits for it."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def is_initialized(self) -> bool:
        """It is where anything is done with it."""
        return True

    def get_rank(self, group: Any = None) -> int:
        """torch may have been told it already."""
        return dist.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        return dist.get_world_size(group)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        """torch may know that the others are past it."""
        return dist.barrier(group, async_op, device_ids)

    def __getattr__(self, name: str) -> Any:
        from deepspeed.comm import comm

        if name in _KNOWN_TO_TORCH:
            return functools.partial(_by_torch, name)
        self._wait()
        return getattr(comm.cdb, name)


# What a set-up's collectives have given to others: see `training.in_loop.recording`.
_KNOWN_TO_TORCH = frozenset({"all_gather", "all_gather_object", "all_reduce", "broadcast", "broadcast_object_list"})


def _by_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed has names of its own for sums and maxima."""
    from deepspeed.comm import ReduceOp

    ops = {op: getattr(dist.ReduceOp, op.name, None) for op in ReduceOp}
    given = [ops[each] if isinstance(each, ReduceOp) else each for each in args]
    return getattr(dist, name)(*given, **kwargs)


def await_group(wait: Callable[[], Any]) -> None:
    """Where there is no group yet, `deepspeed.comm.is_initialized` would answer no."""
    from deepspeed.comm import comm

    if comm.cdb is None:
        comm.cdb = _AwaitedGroup(wait)


def group_comes() -> None:
    """The group is about to be made: DeepSpeed is to wrap it."""
    from deepspeed.comm import comm

    if isinstance(comm.cdb, _AwaitedGroup):
        comm.cdb = None


@contextmanager
def building() -> Iterator[None]:
    """The platform itself builds an engine."""
    global _building
    _building = True
    try:
        yield
    finally:
        _building = False


@functools.cache
def _install() -> None:
    """Once per process."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.zero.partition_parameters import Init

    deepspeed.initialize = _initializing(deepspeed.initialize)
    DeepSpeedEngine.__init__ = _guarded(DeepSpeedEngine.__init__)
    Init.__init__ = _configured(Init.__init__)
    PipelineModule.__init__ = _placed(PipelineModule.__init__, pipeline.placed)
    MoE.__init__ = _placed(MoE.__init__, native.placed)


def _initializing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if _initialize is None or _building:
            return original(*args, **kwargs)
        logger.warning("deepspeed.initialize inside of an elastic run is elastic.initialize")
        return _initialize(*args, **kwargs)

    return initialize


def _guarded(original: Callable[..., None]) -> Callable[..., None]:
    """Whichever way the engine is made: `from deepspeed import initialize`, or by a library."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _initialize is not None and not _building:
            raise UsageError(
                f"a {type(self).__name__} was made inside of an elastic run without elastic.initialize: nothing of it "
                "would be saved or counted; call elastic.initialize, which takes the same arguments"
            )
        original(self, *args, **kwargs)

    return init


def _placed(original: Callable[..., None], placed: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _mesh is None:
            original(self, *args, **kwargs)
        else:
            # It may wait for the generation first.
            found = _mesh()
            with _engines_own():
                placed(original, self, args, kwargs, found)

    return init


def _configured(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        for name in ("config_dict_or_path", "config"):
            given = bound.arguments.get(name)
            if _resolve is not None and not _building and given is not None:
                bound.arguments[name] = _resolve(given)
        original(*bound.args, **bound.kwargs)

    return init

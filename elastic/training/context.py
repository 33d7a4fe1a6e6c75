"""The generation of this process: one at a time, found by everything that the user calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.training.data.data_loaders import PreparedLoader
from elastic.training.generation import Generation
from elastic.training.user.state import State


@dataclass(frozen=True)
class Context:
    """Where this worker is. `step` counts finished optimizer steps at the time of the call; `epoch` is that of the next
    step."""

    rank: int
    world_size: int
    generation: int
    step: int
    device: torch.device
    resumed: bool
    run_id: str
    local_rank: int
    epoch: int = 0
    # The ranks as a grid, {"dp": 2, "sp": 1, "tp": 2, "ep": 1, "pp": 1}, and this rank's place in it: see
    # docs/parallelism.md.
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp": 1, "sp": 1, "tp": 1, "ep": 1, "pp": 1})
    coordinates: Mapping[str, int] = field(default_factory=lambda: {"dp": 0, "sp": 0, "tp": 0, "ep": 0, "pp": 0})
    # The current step is abandoned: outputs from here on do not count, and what is lost of it is dealt again with the
    # next batch.
    abandoned: bool = False

    @classmethod
    def of(cls, generation: Generation) -> Context:
        scope, steps = generation.scope, generation.steps
        return cls(
            rank=scope.spec.rank,
            world_size=scope.spec.world_size,
            generation=scope.spec.generation,
            step=scope.step,
            device=scope.device,
            resumed=scope.spec.checkpoint is not None,
            run_id=scope.spec.run_id,
            local_rank=scope.local_rank,
            epoch=0 if steps is None else steps.epoch,
            mesh=scope.spec.mesh.axes,
            coordinates=scope.spec.mesh.coordinates(scope.spec.rank),
            abandoned=scope.broken,
        )


class _Watched(Context):
    """Calls `_asked` when what is `_watched` is read of it."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == own.get("_watched"):
            own["_asked"]()
        return object.__getattribute__(self, name)


def watched(found: Context, name: str, asked: Callable[[], None]) -> Context:
    made = object.__new__(_Watched)
    vars(made).update(vars(found), _watched=name, _asked=asked)
    return made


class _Early(Context):
    """Of a worker that joins, before it does. What is not known is waited for, and from there on all is as it was
    then, but for what was told before."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own or name not in Context.__dataclass_fields__:
            return object.__getattribute__(self, name)
        if name in own["_known"]:
            own[name] = own["_known"][name]()
        else:
            now = vars(own["_later"]())
            own.update({field: now[field] for field in Context.__dataclass_fields__ if field not in own["_known"]})
        return own[name]


def early(known: Mapping[str, Callable[[], Any]], later: Callable[[], Context]) -> Context:
    made = object.__new__(_Early)
    vars(made).update(_known=known, _later=later)
    return made


_lock = threading.Lock()
_current: Generation | None = None
# What elastic.state is given before a generation exists (a plain script does so before initialize).
_early_state = State()
# The DataLoader that a function has prepared ahead of its generation.
_early_prepared: PreparedLoader | None = None

# The process has no generation yet, and the training function is called ahead of it: waits for one.
_await: Callable[[], None] | None = None


def current() -> Generation | None:
    if _current is None and _await is not None:
        _await()
    return _current


def waits() -> bool:
    """Whether `current` would wait for a generation."""
    return _current is None and _await is not None


def await_with(wait: Callable[[], None] | None) -> None:
    """From here on `current` calls `wait` where there is no generation."""
    global _await
    _await = wait


def prepare_early(prepared: PreparedLoader | None) -> PreparedLoader | None:
    """The generations that are installed from here on have it, until it is None. Returns what was there before."""
    global _early_prepared
    before, _early_prepared = _early_prepared, prepared
    return before


def prepared_early() -> PreparedLoader | None:
    return _early_prepared


def install(generation: Generation) -> None:
    """Make `generation` the process's current one. Raises UsageError when another one is not closed yet."""
    global _current
    with _lock:
        if _current is not None:
            raise UsageError("this process already has a generation; one process runs one at a time")
        generation.state.adopt(_early_state)
        _early_state.clear()
        generation.prepared = _early_prepared
        _current = generation


def replace(old: Generation, new: Generation) -> None:
    """`new` takes the place of `old`, which has been left."""
    global _current
    with _lock:
        if _current is old:
            _current = new


def uninstall(generation: Generation) -> None:
    global _current
    with _lock:
        if _current is generation:
            _current = None


class StateOfTheRun(MutableMapping[str, Any]):
    """`elastic.state`: the state of whatever generation the process is in."""

    def _target(self) -> State:
        generation = _current
        return _early_state if generation is None else generation.state

    def __getitem__(self, key: str) -> Any:
        return self._target()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._target()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._target()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._target())

    def __len__(self) -> int:
        return len(self._target())

    def __repr__(self) -> str:
        return repr(self._target())

    def register(self, **objects: Any) -> None:
        """Keep the state of your own objects: `elastic.state.register(scheduler=scheduler, ema=ema, rng=generator)`.

        An object has `state_dict` and `load_state_dict`, or is a torch.Generator, numpy.random.Generator,
        RandomState or random.Random. Its state is saved with every snapshot, tensors included, and given back before
        the first batch after a recovery: at once where `elastic.initialize` has restored, else when it does. Rank 0's
        state is the run's; where the ranks' differ, the object is named in the log. None in the place of an object
        drops what a checkpoint has under the name.

        Raises UsageError, naming the object and the place in its state, for what cannot be kept: nothing is pickled.
        """
        self._target().register(**objects)

"""The generation that this process is in: one at a time, found by everything that the user calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from elastic.core.errors import CollectiveFailed, GenerationEnded, UsageError, Where
from elastic.core.generation_spec import GenerationSpec
from elastic.training.session import Coordinator, Phase
from elastic.training.user_state import State

if TYPE_CHECKING:
    from elastic.comm.process_group import ProcessGroup
    from elastic.training.data.loader import ElasticLoader
    from elastic.training.engine import ElasticEngine
    from elastic.training.result import BadStep


@dataclass(frozen=True)
class Context:
    """Where this worker is. `step` counts finished optimizer steps at the time of the call."""

    rank: int
    world_size: int
    generation: int
    step: int
    device: torch.device
    resumed: bool
    run_id: str
    local_rank: int


@dataclass
class Generation:
    """What one generation shares between the loader, the engine and the runner.

    Only the training thread changes it, except for `end`, which any thread may call.
    """

    spec: GenerationSpec
    coordinator: Coordinator
    group: ProcessGroup
    device: torch.device
    local_rank: int = 0
    state: State = field(default_factory=State)
    metrics: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    phase: Phase = Phase.IDLE
    engine: ElasticEngine | None = None
    loader: ElasticLoader | None = None
    failure: CollectiveFailed | None = None
    planned: bool = False
    # The step under way came to no number: every rank leaves by itself, and nobody has saved it.
    bad_step: BadStep | None = None
    _ended: str | None = None

    def end(self, reason: str) -> None:
        """Make every later `check` raise. The first reason stays."""
        if self._ended is None:
            self._ended = reason

    @property
    def ended(self) -> str | None:
        return self._ended

    def check(self) -> None:
        """Raise GenerationEnded or the collective's failure once this generation cannot go on.

        Called by everything that the user's loop calls, so that an `except Exception` in it cannot keep a dead
        generation turning.
        """
        if self._ended is not None:
            raise GenerationEnded(self.spec.generation, self._ended)
        if self.failure is not None:
            raise self.failure

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.coordinator.phase(phase)

    def where(self) -> Where:
        return Where(rank=self.spec.rank, step=self.step, generation=self.spec.generation)

    def context(self) -> Context:
        return Context(
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            generation=self.spec.generation,
            step=self.step,
            device=self.device,
            resumed=self.spec.checkpoint is not None,
            run_id=self.spec.run_id,
            local_rank=self.local_rank,
        )


_lock = threading.Lock()
_current: Generation | None = None
# What is put into elastic.state before a generation exists (a plain script does so before initialize).
_early_state = State()


def current() -> Generation | None:
    return _current


def install(generation: Generation) -> None:
    """Make `generation` the process's own. Raises UsageError when another one is still there."""
    global _current
    with _lock:
        if _current is not None:
            raise UsageError("this process already has a generation; one process runs one at a time")
        generation.state.load(_early_state)
        _early_state.clear()
        _current = generation


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

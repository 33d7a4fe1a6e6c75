"""What one process holds of its generation: process groups, engine, loader, and what the user's code gave.

Only the runner, `elastic.initialize` and `local` see it; everything below them is given the parts that it needs.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from typing import Any

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.process_group import ProcessGroup, are_held, drop_later
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.engines import foreign_loops
from elastic.engines.base import Engine, EngineKind
from elastic.engines.select import engine_kind
from elastic.training import cleanup
from elastic.training.data.data_loaders import PreparedLoader
from elastic.training.data.loader import ElasticLoader
from elastic.training.engine import ElasticEngine
from elastic.training.scope import GenerationScope
from elastic.training.session import Coordinator, InLoop
from elastic.training.step_loop import StepLoop
from elastic.training.user import accelerate_calls, group_calls
from elastic.training.user.state import State
from elastic.training.watch import memory_use


class Generation:
    """Call order, on the training thread: 1. `join` 2. `own` when an engine is built, `began` when it can train
    3. `close`."""

    def __init__(
        self,
        spec: GenerationSpec,
        coordinator: Coordinator,
        rendezvous: Rendezvous,
        local_rank: int = 0,
        kind: EngineKind | None = None,
    ) -> None:
        self.kind = kind or engine_kind(spec.engine)
        self.group = ProcessGroup(spec, rendezvous, self.kind, local_rank)
        self.scope = GenerationScope(spec, coordinator, self.kind.device(local_rank)[1], local_rank)
        self.scope.collectives = self.group.collectives
        self.state = State()
        # None: the user's function is left with the generation.
        self.in_loop: InLoop | None = None
        self.steps: StepLoop | None = None
        # The DataLoader that the user's code prepared before the engine is built.
        self.prepared: PreparedLoader | None = None
        self.engine: ElasticEngine | None = None
        self.loader: ElasticLoader | None = None
        # What `close` closes, the last first.
        self.closing = ExitStack()
        self.ledger: CollectiveLedger | None = None
        self._metrics: dict[str, Any] = {}
        self._stays = False
        self._native: weakref.ReferenceType[Any] | None = None

    def join(self) -> None:
        """Join the process groups. Raises what `ProcessGroup.join` raises."""
        cleanup.warm_up(self.kind)
        self.scope.device = self.group.join(self.scope.check)
        spec = self.scope.spec
        if spec.reports_memory:
            memory_use.begin(self.scope.device)
        self.kind.answer_user_calls(public_initialize, spec.run_id, lambda: spec, self._engines_own)
        self.closing.callback(self.kind.answer_user_calls, None, spec.run_id, lambda: spec)
        if not self.scope.coordinator.keeps_nothing:
            foreign_loops.refuse(self.kind.name)
            self.closing.callback(foreign_loops.allow)
            group_calls.keep()
            self.closing.callback(group_calls.release)
            accelerate_calls.joined(spec.rank, spec.mesh, lambda: self.engine)
            self.closing.callback(accelerate_calls.left)

    def _engines_own(self) -> AbstractContextManager[None]:
        return nullcontext() if self.in_loop is None else self.in_loop.engines_own()

    @property
    def has_engine(self) -> bool:
        return self._native is not None

    def own(self, engine: Engine) -> None:
        """From here on the engine is closed however the generation ends."""
        self._native, self.ledger = weakref.ref(engine.native), engine.ledger
        for axis in ("sp", "tp"):
            if (shared := self.group.along(axis)) is not None:
                self.ledger.name_axis(shared, axis)
        self.closing.callback(lambda: engine.detach() if self._stays else engine.close())

    def began(self, steps: StepLoop, engine: ElasticEngine, loader: ElasticLoader) -> None:
        self.steps, self.engine, self.loader = steps, engine, loader
        accelerate_calls.began()
        self.closing.callback(engine.close)
        self.closing.callback(loader.close)

    def note(self, metrics: dict[str, Any]) -> None:
        """Of the user's: for the report of the current step (between two steps: of the one just finished)."""
        self._metrics.update(metrics)

    def take_metrics(self) -> dict[str, Any]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self, stays: bool = False) -> bool:
        """Close the loader, the engine and the groups; True when nothing of the engine is left in this process.

        `stays`: the user's function stays in its loop, and the next engine is built on the same model and optimizer.
        """
        self.steps = self.engine = self.loader = self.ledger = None
        self._stays = stays
        made = cleanup.made_by(self._native()) if stays and self._native is not None else []
        try:
            self.closing.close()
        finally:
            self.scope.failure = None
            groups = self.group.close()
        # An engine that was detached is empty: what still refers to it keeps nothing alive.
        remains = not stays or cleanup.outlived(made) or are_held(groups)
        gone = cleanup.collect(None if stays else self._native, remains)
        # To which nothing else refers by now.
        drop_later(groups)
        return gone

    def collect(self) -> bool:
        """The user's function has been left since `close`: the same verdict again."""
        return cleanup.collect(self._native)


def public_initialize(*args: Any, **kwargs: Any) -> Any:
    """`elastic.initialize`, by its public name: the module that defines it is above this one."""
    return import_module("elastic").initialize(*args, **kwargs)

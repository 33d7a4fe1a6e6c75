"""`ray.train.report`, `get_context`, `get_checkpoint` and `get_dataset_shard` inside of a training function.

Ray Train 2.60 looks up one object per process for them (ray/train/v2/_internal/execution/train_fn_utils.py). Here it is
one that asks the generation of the process. It is handed over when that module is imported, since importing Ray Train
takes seconds and most training functions never do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic.core.errors import UsageError
from elastic.engines.when_imported import when_imported
from elastic.training.watch.once import warn_once

if TYPE_CHECKING:
    from elastic.training.context import Context

logger = logging.getLogger(__name__)

_HOME = "ray.train.v2._internal.execution.train_fn_utils"


def install() -> None:
    """Once per process, before the user's code runs."""
    when_imported(_HOME, lambda module: module.set_train_fn_utils(TrainFunctionFace()))


class TrainFunctionFace:
    """Takes the place of Ray Train's `TrainFnUtils`. What an elastic run cannot answer is refused by name."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **options: Any) -> None:
        """Metrics go where `elastic.report` puts them. No barrier: every rank reports for itself."""
        from elastic.training import api

        if options.get("validation"):
            raise UsageError("ray.train.report(validation=...) is not supported in an elastic run; leave it out")
        if checkpoint is not None and _holds_files(checkpoint):
            raise UsageError(
                "ray.train.report(checkpoint=...): files of your own are not kept by an elastic run, which saves and "
                "restores model, optimizer, scheduler and position by itself; leave checkpoint out, and keep small "
                "state in elastic.state"
            )
        api.report(**metrics)

    def get_context(self) -> ContextFace:
        return ContextFace()

    def get_checkpoint(self) -> None:
        """None also after a restore: there is nothing left for the function to load."""
        warn_once(
            logger, "ray.train.get_checkpoint is None in an elastic run: elastic.initialize has restored everything"
        )

    def get_all_reported_checkpoints(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        raise UsageError(
            "ray.train.get_dataset_shard is not supported in an elastic run: a streamed shard cannot be dealt anew "
            "when the number of workers changes; pass a map-style dataset or a DataLoader as training_data= of "
            "elastic.initialize"
        )

    def get_preemption_info(self) -> None:
        """The platform leaves a node that is preempted at a step boundary by itself."""

    def is_distributed(self) -> bool:
        return True

    def barrier(self) -> None:
        import torch.distributed as dist

        _scope_check()
        dist.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        import torch.distributed as dist

        _scope_check()
        held = [data]
        dist.broadcast_object_list(held, src=0)
        return held[0]


class ContextFace:
    """Ray Train's `TrainContext` for the generation of this process. Ranks change with the generation."""

    def get_experiment_name(self) -> str:
        return _context().run_id

    def get_trial_name(self) -> str:
        return _context().run_id

    def get_trial_id(self) -> str:
        return _context().run_id

    def get_world_size(self) -> int:
        import torch.distributed as dist

        # Ahead of its generation a worker may be told, see `in_loop.ahead`.
        return dist.get_world_size() if _is_ahead() else _context().world_size

    def get_world_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank() if _is_ahead() else _context().rank

    def get_local_rank(self) -> int:
        """Of the device: a worker sees its own devices only."""
        return int(os.environ["LOCAL_RANK"]) if _is_ahead() else _context().local_rank

    def get_metadata(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            raise UsageError(
                f"ray.train.get_context().{name}() is not known in an elastic run, in which workers come and go; "
                "use elastic.get_context()"
            )
        raise AttributeError(name)


def _context() -> Context:
    from elastic.training import api

    return api.get_context()


def _is_ahead() -> bool:
    from elastic.training.context import waits

    return waits()


def _scope_check() -> None:
    """Before a collective of the user's: not in a generation that has ended."""
    from elastic.training.context import current

    generation = current()
    if generation is not None:
        generation.scope.check()


def _holds_files(checkpoint: Any) -> bool:
    """False for the folder that a script filled by `engine.save_checkpoint`, which is the platform's own here."""
    path = str(getattr(checkpoint, "path", ""))
    return not (os.path.isdir(path) and not any(files for _, _, files in os.walk(path)))

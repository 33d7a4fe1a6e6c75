"""Training without Ray: for `python train.py`, torchrun, debugging one worker, and tests of it."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from typing import Any

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.core.errors import UsageError
from elastic.training import cleanup, context, rng
from elastic.training.context import Generation
from elastic.training.process_group import ProcessGroup, Rendezvous, backend_and_device, host_store
from elastic.training.session import GenerationSpec, Phase, RestoreReport, StepReport

logger = logging.getLogger(__name__)


class SilentCoordinator:
    """A generation that nobody watches: no checkpoints, no planned end. Steps are logged at DEBUG."""

    def source(self) -> CheckpointSource:
        raise UsageError("this run has no checkpoint storage")

    def phase(self, phase: Phase) -> None:
        logger.debug("phase %s", phase.value)

    def restored(self, report: RestoreReport) -> None:
        logger.debug("restored %s", report)

    def boundary(self, step: int) -> bool:
        return False

    def step_done(self, report: StepReport, metrics: Mapping[str, Any]) -> None:
        logger.debug("step %d: loss %.6f %s", report.step, report.loss, dict(metrics))

    def save(self, snapshot: ShardSnapshot) -> None:
        """Nothing is kept: a plain script has no checkpoint storage."""


def start_local() -> Generation:
    """Begin a generation in this process from torchrun's variables, or alone when they are not set.

    It lasts until the process ends.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world_size > 1:
        # torchrun serves a store of its own there; rank 0 would otherwise have to.
        rendezvous = Rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    else:
        rendezvous = host_store("127.0.0.1")
    spec = GenerationSpec(run_id="local", generation=1, rank=rank, world_size=world_size, max_world_size=world_size)
    group = ProcessGroup(spec, rendezvous, local_rank)
    generation = Generation(spec, SilentCoordinator(), group, backend_and_device(local_rank)[1], local_rank)
    context.install(generation)
    generation.device = group.join(generation.check)
    rng.seed_everything(spec.seed, "build")
    atexit.register(_leave, generation)
    return generation


def _leave(generation: Generation) -> None:
    if generation.loader is not None:
        generation.loader.close()
    if generation.engine is not None:
        cleanup.release_engine(generation.engine.deepspeed)
        generation.engine.let_go()
    generation.group.leave()
    context.uninstall(generation)

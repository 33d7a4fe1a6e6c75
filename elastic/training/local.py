"""Training without Ray: for `python train.py`, torchrun, debugging one worker, and tests of it.

    rendezvous = host_store("127.0.0.1")            # in rank 0's process; tell the others
    result = run_local(train, config, spec, rendezvous, url="/tmp/checkpoints")

runs one generation of one rank. The next generation is another call, in the same processes or in others, with
`GenerationSpec.checkpoint` naming one of `CheckpointStore(url, run_id).list()`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.checkpoint.storage import CheckpointStore
from elastic.checkpoint.writer import BackgroundWriter
from elastic.comm.process_group import await_dropped
from elastic.comm.rendezvous import host_store
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.data.steps import StepReport
from elastic.core.errors import ElasticError, Fenced, UsageError
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.core.typed_json import decode, encode
from elastic.engines.select import check_engine
from elastic.training import context, rng
from elastic.training.generation import Generation
from elastic.training.loop import GenerationRunner
from elastic.training.result import GenerationResult
from elastic.training.session import Phase, RestoreReport, SnapshotMemory, Stop

logger = logging.getLogger(__name__)


class SilentCoordinator:
    """A generation without a controller: no checkpoints, no planned end. Steps are logged at DEBUG."""

    keeps_nothing = True

    def source(self) -> CheckpointSource:
        raise UsageError("this run has no checkpoint storage")

    def folder(self) -> str | None:
        return None

    def phase(self, phase: Phase) -> None:
        logger.debug("phase %s", phase.value)

    def restored(self, report: RestoreReport) -> None:
        logger.debug("restored %s", report)

    def memory(self) -> SnapshotMemory | None:
        return None

    def shard_server(self) -> tuple[tuple[str, int], bytes] | None:
        return None

    def recent_steps(self) -> list[dict[str, Any]]:
        return []

    def cadence(self, step: int, every_steps: int, cost_s: float, step_s: float) -> None:
        logger.debug("from step %d on a snapshot every %d steps", step, every_steps)

    def moved(self, over: bool = False) -> None:
        """Nobody watches for hangs."""

    def passes(self, described: Sequence[Any]) -> None:
        """Nobody joins."""

    def recorded(self, recording: bytes) -> None:
        """Nobody joins."""

    def memory_lost(self, reason: str) -> None:
        logger.warning("no snapshots in memory: %s", reason)

    def memory_used(self, told: Mapping[str, Any]) -> None:
        return None

    def replica_moved(self, sentence: str) -> None:
        logger.warning("%s", sentence)

    def boundary(self, step: int) -> Stop | None:
        return None

    def step_done(self, report: StepReport) -> None:
        logger.debug("step %d: loss %.6f %s", report.step, report.loss, dict(report.metrics))

    def can_save(self) -> bool:
        return True

    def save_left_out(self, step: int) -> None:
        logger.warning("the save of step %d is left out: storage is slower than the cadence", step)

    def save(self, snapshot: ShardSnapshot) -> None:
        """Nothing is kept: a plain script has no checkpoint storage."""


class LocalCoordinator(SilentCoordinator):
    """A generation with checkpoints, members of which are plain processes.

    Each rank writes its shard concurrently with training; the records are gathered in the generation's own store, and
    rank 0 commits. Unlike the runtime's, `save` waits until the previous snapshot is written. `end_at` is the step at
    which the generation ends as planned.
    """

    keeps_nothing = False

    def __init__(self, spec: GenerationSpec, rendezvous: Rendezvous, url: str, end_at: int | None = None) -> None:
        self._spec = spec
        self._rendezvous = rendezvous
        self._end_at = end_at
        self._store = CheckpointStore(url, spec.run_id)
        self._records: Store | None = None
        self._writer = BackgroundWriter(self._store, self._written, self._failed)
        self.reports: list[StepReport] = []
        self.restores: list[RestoreReport] = []

    def source(self) -> CheckpointSource:
        return self._store

    def folder(self) -> str | None:
        return self._store.folder

    def restored(self, report: RestoreReport) -> None:
        self.restores.append(report)

    def boundary(self, step: int) -> Stop | None:
        return Stop.DURABLE if step == self._end_at else None

    def step_done(self, report: StepReport) -> None:
        super().step_done(report)
        self.reports.append(report)

    def save(self, snapshot: ShardSnapshot) -> None:
        self._writer.flush()
        self._writer.submit(snapshot)

    def close(self, wait: bool) -> None:
        """Stop writing; with `wait`, after every save is complete. Call it before the generation's store is closed."""
        if wait:
            self._writer.flush()
        self._writer.close(timeout_s=None if wait else 0.0)
        self._records = None

    def _written(self, record: ShardRecord) -> None:
        """On the writer's thread. The store has no authentication: what is read from it is JSON that is checked."""
        records = self._connected()
        key = f"records/{self._spec.generation}/{record.step}/"
        records.set(f"{key}{self._spec.rank}", json.dumps(encode(record)))
        if self._spec.rank != 0:
            return
        try:
            told = records.multi_get([f"{key}{rank}" for rank in range(self._spec.world_size)])
        except DistError as error:
            # A rank that has failed tells none, and the store goes with its generation.
            raise Fenced(
                f"generation {self._spec.generation}: not every rank has told its shard of step {record.step}: {error}"
            ) from error
        shards = [decode(ShardRecord, json.loads(text)) for text in told]
        manifest = assemble(shards, run_id=self._spec.run_id, written_at=time.time())
        self._store.commit(manifest)
        self.committed(manifest)

    def committed(self, manifest: Manifest) -> None:
        """A checkpoint is complete: on rank 0 only, on the writer's thread. For subclasses."""

    def _failed(self, step: int, error: ElasticError, next_retry_s: float | None) -> None:
        """The writer has logged it."""

    def _connected(self) -> Store:
        # A connection of its own: one that waits in multi_get keeps every other user of it waiting.
        if self._records is None:
            self._records = TCPStore(
                self._rendezvous.host, self._rendezvous.port, is_master=False, wait_for_workers=False
            )
            self._records.set_timeout(timedelta(seconds=self._spec.collective_timeout_s))
        return self._records


def run_local(
    fn: Callable[..., Any],
    config: Mapping[str, Any] | None,
    spec: GenerationSpec,
    rendezvous: Rendezvous,
    url: str,
    end_at: int | None = None,
) -> tuple[GenerationResult, LocalCoordinator]:
    """Run one generation of one rank in the calling thread, with checkpoints below `url`."""
    coordinator = LocalCoordinator(spec, rendezvous, url, end_at)

    def close(result: GenerationResult) -> None:
        coordinator.close(
            wait=result.kind in ("finished", "anomaly") or (result.kind == "ended" and result.step == end_at)
        )

    runner = GenerationRunner(spec, coordinator, rendezvous, on_result=close)
    return runner.run(fn, config), coordinator


def start_local() -> Generation:
    """Begin a generation in this process from torchrun's variables, or alone when they are not set, with the engine
    that ELASTIC_ENGINE names. Raises UsageError for an unknown one.

    It lasts until the process ends.
    """
    engine = os.environ.get("ELASTIC_ENGINE") or GenerationSpec.engine
    check_engine(engine)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    rendezvous = _rendezvous(rank, world_size)
    spec = GenerationSpec("local", 1, rank, world_size, max_world_size=world_size, engine=engine)
    generation = Generation(spec, SilentCoordinator(), rendezvous, local_rank)
    context.install(generation)
    generation.join()
    rng.seed_everything(spec.seed, "build")
    atexit.register(_leave, generation)
    return generation


def _rendezvous(rank: int, world_size: int) -> Rendezvous:
    if world_size == 1:
        return host_store("127.0.0.1")
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"WORLD_SIZE is {world_size}, so MASTER_ADDR and MASTER_PORT must be set") from error
    # torchrun's agent hosts a store there and says so; with other launchers rank 0 hosts it.
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return host_store(host, port)
    return Rendezvous(host, port)


def _leave(generation: Generation) -> None:
    generation.close()
    context.uninstall(generation)
    # Python waits for no thread any more, and gloo ends a process that ends amid of it by SIGABRT.
    await_dropped()

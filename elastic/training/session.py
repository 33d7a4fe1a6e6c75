"""The seam between training and the runtime: what one rank of a generation asks for and reports.

The runtime (Ray) implements `Coordinator`; `elastic.training.local` implements it for plain processes, so that one
worker can be run and debugged without Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from elastic.core.data.steps import StepReport

if TYPE_CHECKING:
    from elastic.checkpoint.snapshot import ShardSnapshot
    from elastic.checkpoint.source import BytesRead, CheckpointSource
    from elastic.core.checkpoint.manifest import ShardRecord


class Stop(str, Enum):
    """Where the last step of a generation that ends as planned must be kept. LAST: in storage, and the run stops."""

    LAST = "last"
    DURABLE = "durable"
    MEMORY = "memory"


class Phase(str, Enum):
    """What a worker is doing; part of every heartbeat."""

    IDLE = "idle"
    JOINING = "joining"
    BUILDING = "building"
    RESTORING = "restoring"
    TRAINING = "training"
    SAVING = "saving"
    HOLDING = "holding"
    LEAVING = "leaving"


@dataclass(frozen=True)
class RestoreReport:
    """How the state came back: `bytes_read` equals `bytes_needed` unless a source had to read more, and is the
    sum of `bytes_from`. `kept` counts the micro-batches of the next step that this rank had computed before and does
    not compute again; `again` says why it does, where it had some."""

    checkpoint: str
    source: str
    step: int
    bytes_read: int
    bytes_from: BytesRead
    bytes_needed: int
    read_s: float
    install_s: float
    verify_s: float
    kept: int = 0
    again: str = ""


class SnapshotMemory(Protocol):
    """The memory of this rank's node, and through it that of the nodes that hold replicas.

    Once per generation `open`; for every snapshot `segment`, then `commit` (from any thread, when it is filled).
    """

    @property
    def node(self) -> str:
        """The same for the ranks of one node alone."""
        ...

    def open(
        self,
        template: ShardRecord,
        nbytes: int,
        targets: Sequence[tuple[str, int]],
        base: tuple[int, int] | None = None,
        stripe: Sequence[int] = (),
        spares: Sequence[tuple[str, int]] = (),
    ) -> None:
        """`base`: (generation, step) of what was restored; `stripe`, `spares`: see `MemoryPlan`.

        Raises UsageError when the node has not enough memory. Any call may raise StorageError when the node's memory
        is out of reach, and Fenced after a newer generation.
        """
        ...

    def segment(self) -> memoryview:
        """Writable memory for the next snapshot; its former content is no longer a snapshot."""
        ...

    def commit(self, step: int, extra_state: Mapping[str, Any] | None) -> None: ...

    def complete(self) -> int:
        """The newest step whose own copy and replicas are complete; -1 without any. StorageError: no more will be."""
        ...

    def wait_complete(self, step: int, timeout_s: float) -> bool: ...

    def failed(self) -> str | None:
        """Why snapshots do not become complete at present, in one sentence; None where they do."""
        ...

    def moved(self) -> str | None:
        """Which node keeps replicas in the place of another one that did not take them, in one sentence."""
        ...

    def settled(self, step: int) -> None:
        """Every rank's snapshot of `step` is complete: older ones can be dropped."""
        ...

    def abandon(self) -> None:
        """The memory of `segment` may still be written, by a device or a thread: it is not used again."""
        ...


class InLoop(Protocol):
    """Keeps the user's function in its loop while generations change. On the training thread."""

    @property
    def called_again(self) -> bool:
        """Has this process called the function before?"""
        ...

    def rank_asked(self) -> None:
        """The function is told its rank before its first batch."""
        ...

    def engines_own(self) -> AbstractContextManager[None]:
        """Around what the engine makes with all ranks in the function's set-up, those too that are in their loop."""
        ...

    def initializing(self) -> None:
        """`elastic.initialize` was called: the function's set-up is done."""
        ...

    def keep(self, given: Any, handles: Any) -> None:
        """What `elastic.initialize` was given and what it returned: the next generation is built from it."""
        ...

    def on_its_own(self) -> None:
        """From here on the user's code runs outside of the steps, up to `comes_back`."""
        ...

    def comes_back(self) -> None:
        """It asks for the first batch of an iteration."""
        ...

    def batch_over(self, own: int, last: bool) -> None:
        """The loop has done with a batch, the `last` of its step or another, and has begun so many collectives of its
        own meanwhile."""
        ...

    def step_asked(self) -> None:
        """The loop has asked for the run's step."""
        ...

    def abandon(self, error: BaseException) -> bool:
        """The current step failed with `error`. True: the step is abandoned, later calls of it do nothing, and
        `recover` follows. False: `error` must be raised."""
        ...

    def recover(self, error: BaseException) -> None:
        """Leave the generation that ended with `error`, wait for the next one and build it underneath the handles.

        Raises `error`, or GenerationEnded, where the user's function must be left."""
        ...


class Coordinator(Protocol):
    """The runtime as seen from the training thread of one rank. Call order within a generation:

    1. `source` once, before the first step, when the spec names a checkpoint
    2. `phase` whenever it changes
    3. `restored` once, when state from a checkpoint has been installed; its verification may still run
    4. `boundary` before the first micro-batch of every step, and once more after the last step
    5. `step_done` for every optimizer step, when the loop asks for the batch after it
    6. `save` after a step whose checkpoint is due, from any thread; must return at once (the shard is written
       concurrently with training)

    `boundary(step)` gets the number of finished optimizer steps. It returns a Stop when this generation ends here as
    planned: the caller then saves exactly this step, to storage or to memory, and raises GenerationEnded. It may block
    while members agree on the step. It raises GenerationEnded when the generation was aborted. Every method may raise
    it.
    """

    # Nothing is saved for this generation, whatever is handed to `save`: a script outside of a run.
    keeps_nothing: bool

    def source(self) -> CheckpointSource: ...

    def folder(self) -> str | None:
        """Of the run, where its checkpoints are kept, as a URL; None where nothing is kept."""
        ...

    def phase(self, phase: Phase) -> None: ...

    def restored(self, report: RestoreReport) -> None: ...

    def memory(self) -> SnapshotMemory | None:
        """Where the spec has a `memory` plan: the node's memory, if it has any."""
        ...

    def shard_server(self) -> tuple[tuple[str, int], bytes] | None:
        """Where the parameter server of this rank's node listens, and the run's token; None where there is none."""
        ...

    def recent_steps(self) -> list[dict[str, Any]]:
        """The latest reports of `step_done`, as JSON; from any thread."""
        ...

    def cadence(self, step: int, every_steps: int, cost_s: float, step_s: float) -> None:
        """From `step` on a snapshot is taken into memory every `every_steps` steps, for what one costs."""
        ...

    def moved(self, over: bool = False) -> None:
        """The user's code makes progress although no step ends: an evaluation, an export. At most about once a second;
        from any thread. `over`: all steps of the run are done and saved, and whatever follows may take its time."""
        ...

    def passes(self, described: Sequence[Any]) -> None:
        """What forward passes of training look like, as JSON, for workers that join: see `in_loop.passes`."""
        ...

    def recorded(self, recording: bytes) -> None:
        """What the collectives of the set-up gave, for workers that join: see `in_loop.recording`. Empty: they make
        them with all others."""
        ...

    def memory_lost(self, reason: str) -> None:
        """No more snapshots are taken into memory in this generation. `reason` is empty where another rank has it."""
        ...

    def replica_moved(self, sentence: str) -> None:
        """Another node than planned keeps this rank's replicas from now on."""
        ...

    def memory_used(self, told: Mapping[str, Any]) -> None:
        """Once, after the first steps, where the spec asks for it: see `core.sharding.mesh_memory.MemoryReports`."""
        ...

    def boundary(self, step: int) -> Stop | None: ...

    def step_done(self, report: StepReport) -> None: ...

    def can_save(self) -> bool:
        """False while a snapshot that `save` was given waits behind another: storage is slower than the cadence."""
        ...

    def save_left_out(self, step: int) -> None:
        """The save of `step` was due and is left out on all ranks, because `can_save` was false on one of them."""
        ...

    def save(self, snapshot: ShardSnapshot) -> None: ...

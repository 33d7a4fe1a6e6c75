"""What the controller sends to every member of a generation: rank, batch, rendezvous, checkpoint. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.data.adaptive_batch import AdaptiveBatch
from elastic.core.data.steps import Range
from elastic.core.mesh import Mesh
from elastic.core.settings import AnomalySettings, CommunicationSettings, RunSettings, WeightsSettings


@dataclass(frozen=True)
class BatchSettings:
    """`global_batch` and `micro_batch` count samples. None: taken from the DeepSpeed config that the user passes.
    `adaptive`: the global batch follows the number of workers, and this one is that of the most."""

    global_batch: int | None = None
    micro_batch: int | None = None
    max_steps: int | None = None
    epochs: int | None = None
    adaptive: AdaptiveBatch | None = None

    @classmethod
    def of(cls, settings: RunSettings) -> BatchSettings:
        return cls(
            settings.global_batch, settings.micro_batch, settings.max_steps, settings.epochs, settings.adaptive_batch
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Snapshots of one rank in its node's memory; see `core.settings.SnapshotSettings`.

    `targets` hold the replicas; one that does not take them is replaced by one of `spares`. With `stripe` they keep the
    parity of these ranks' shards instead, this one among them.
    """

    targets: tuple[tuple[str, int], ...] = ()
    stripe: tuple[int, ...] = ()
    every_steps: int | None = None
    cost_limit: float = 0.01
    required: bool = False
    spares: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """Where the store of one generation listens. Of no use to any other generation."""

    host: str
    port: int


@dataclass(frozen=True)
class GenerationSpec:
    """Fixed for one generation. Sent to every member by the controller, which makes its own of it by `of_rank`."""

    run_id: str
    generation: int
    rank: int
    world_size: int
    seed: int = 0
    # How many neighbouring ranks share each sequence, each layer, the experts, or the layers; see `core.mesh`.
    sp: int = 1
    tp: int = 1
    # By how many ranks each layer may be shared in other generations; empty: by as many.
    tp_sizes: tuple[int, ...] = ()
    # They are all that there could be: one that the model cannot be cut by is left out (`MeshRefused`).
    any_tp: bool = False
    ep: int = 1
    # By how many ranks the experts may be shared in other generations; empty: by as many. Where there are several
    # numbers the model's experts have the same names with `ep` 1.
    ep_sizes: tuple[int, ...] = ()
    pp: int = 1
    # Other generations may have another mesh, which depends on what this one needs; and what the job reserves of the
    # host's memory for a worker.
    reports_memory: bool = False
    worker_memory_bytes: int | None = None
    # The size that DeepSpeed configs written for a fixed world size are read with.
    max_world_size: int = 1
    batch: BatchSettings = field(default_factory=BatchSettings)
    checkpoint: str | None = None
    checkpoint_every_steps: int | None = None
    # The kind of engine (see `elastic.engines.select`), and the configuration that the job gives it.
    engine: str = "deepspeed"
    engine_config: Mapping[str, Any] | None = None
    # What a generation without a checkpoint begins with.
    weights: WeightsSettings | None = None
    memory: MemoryPlan | None = None
    # Ranges of positions that the run leaves out; and the handling of a non-finite loss (None: not watched).
    skips: tuple[Range, ...] = ()
    anomalies: AnomalySettings | None = None
    # Every how many steps the gradient noise is measured; None: never.
    noise_every_steps: int | None = None
    # Every how many steps ranks compute a micro-batch of each other once more; None: never.
    audit_every_steps: int | None = None
    # How gradients travel (None: as the engine sends them), and the number of each rank's node (none: they share one).
    communication: CommunicationSettings | None = None
    nodes: tuple[int, ...] = ()
    # No step is done before the coordinator says where to stop: the generation only saves what it begins with.
    stops_at_start: bool = False
    # Of a stream: what completed steps beyond the checkpoint have read, by their first position. Done again, they must
    # read the same.
    content: Mapping[int, int] = field(default_factory=dict)
    # A collective that makes no progress for this long fails by itself, whatever else goes wrong. Over NCCL it is only
    # noticed then, and has to be aborted: torch would end the process instead (`comm.nccl`).
    collective_timeout_s: float = 600.0

    @classmethod
    def alone(cls, settings: RunSettings) -> GenerationSpec:
        """Of one worker that trains by itself: nothing of it is kept."""
        return cls(
            settings.run_id,
            1,
            0,
            1,
            settings.seed,
            max_world_size=settings.scaling.max_workers,
            batch=BatchSettings.of(settings),
            engine=settings.engine,
            engine_config=settings.engine_config,
            collective_timeout_s=settings.failures.collective_timeout_s,
        )

    def of_rank(self, rank: int, memory: MemoryPlan | None) -> GenerationSpec:
        """The same generation's for another rank: only this, and where its snapshots go, are its own."""
        return replace(self, rank=rank, memory=memory)

    @property
    def ep_changes(self) -> bool:
        return len(self.ep_sizes) > 1

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.world_size, self.sp, self.tp, self.ep, self.pp)

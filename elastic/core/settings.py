"""The settings of a run, fixed at its start: plain frozen data with exact JSON forms.

Every timeout and every budget of the project is in `FailureSettings`, and nowhere else. `elastic_jobs.job_file.spec`
reads the same fields from a job file and checks them; what arrives here has been checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from elastic.core.data.adaptive_batch import AdaptiveBatch
from elastic.core.errors import UsageError
from elastic.core.mesh import MeshSettings

Json = Any


@dataclass(frozen=True)
class FailureSettings:
    """All timeouts (seconds) and budgets (counts). A budget counts a streak: progress sets it back to zero."""

    # Failure detection.
    heartbeat_s: float = 0.2
    # Silence after which a worker is suspected and probed; without an answer by then it counts as lost.
    suspect_after_s: float = 1.0
    # In a run of more nodes, so many at a time have one's agent pass on their heartbeats, step reports and commands; 0:
    # never.
    nodes_per_relay: int = 100
    probe_timeout_s: float = 0.5
    # A node whose agent is silent this many times in a row counts as lost, although its workers answer their probes.
    silent_agent_limit: int = 8
    # No step for max(floor, factor * median step time), with heartbeats continuing, is a hang.
    hang_floor_s: float = 30.0
    hang_factor: float = 10.0
    # How long a worker may take to leave its generation, before it is left out.
    abort_timeout_s: float = 3.0
    # Survivors stay in their training loop while the generation changes; false: their function is called again.
    in_loop: bool = True
    # From the start of a generation to every member's first sign of training; reading state counts from its last byte.
    join_timeout_s: float = 120.0
    # From asking for a worker process to its first heartbeat; imports of a large script are in it.
    worker_start_timeout_s: float = 180.0
    # A collective that makes no progress for this long fails by itself, whatever else goes wrong.
    collective_timeout_s: float = 600.0
    # Querying the nodes for their snapshots; a node that has not answered by then counts as holding none.
    survey_timeout_s: float = 2.0
    # A node that is lost repeatedly, or that other nodes cannot reach, is quarantined for base * 2**n, up to the limit.
    quarantine_s: float = 60.0
    quarantine_limit_s: float = 3600.0
    # Planned ends (scale up, drain, stop) may take this long to save before they are forced.
    drain_timeout_s: float = 60.0
    # A draining node that the run needs for `min_workers` is left this long before its deadline.
    drain_margin_s: float = 10.0

    # Budgets.
    user_error_retries: int = 0
    # Failed generations in a row without a new checkpoint or a new furthest step.
    crash_streak: int = 5
    startup_retries: int = 3
    # Pause before the second, third, ... failed generation in a row: base * 2**n, up to the limit.
    retry_backoff_s: float = 0.5
    retry_backoff_limit_s: float = 30.0

    # Limit of the wait for `min_workers`. None: no limit, which suits clusters with an autoscaler.
    capacity_timeout_s: float | None = None
    # Workers continue to train without a controller for this long, then they end.
    controller_lease_s: float = 120.0

    # Storage: training continues while writes are retried with pauses base * 2**n, up to the limit.
    storage_backoff_s: float = 1.0
    storage_backoff_limit_s: float = 60.0
    storage_timeout_s: float = 300.0


# Defaults of jobs whose workers have a GPU. Leaving a generation contains NCCL's abort, copies from the device that are
# under way, and freeing the device's memory; joining contains making contexts and communicators and filling the device;
# the start of a worker contains nvcc, where the image has no kernels.
GPU_FAILURES: Mapping[str, float] = {
    "abort_timeout_s": 30.0,
    "join_timeout_s": 300.0,
    "worker_start_timeout_s": 600.0,
}


@dataclass(frozen=True)
class ScalingSettings:
    """How many workers a run may have. A slot (one node's share) holds `workers_per_slot` of them."""

    min_workers: int = 1
    max_workers: int = 1
    workers_per_slot: int = 1
    # A first start with fewer than max_workers waits this long, so that nodes that arrive together start together.
    gather_s: float = 5.0
    # Slots beyond `max_workers` whose workers are prepared and stand by, to replace a lost worker at once.
    spare_slots: int = 0
    # Of two runs that want the same slots the one with the larger number gets them; see core.policy.priority_sharing.
    priority: int = 0
    # After waiting this long for a slot, other runs are asked to release one.
    share_after_s: float = 30.0
    # When to start and when to grow: a name in `core.policy.scaling_policies.POLICIES`.
    policy: Literal["eager", "measured", "patient"] = "eager"
    # What an hour of a node costs, in any currency: the costs that the policy compares are told in it too.
    price_per_node_hour: float | None = None

    @property
    def min_slots(self) -> int:
        return -(-self.min_workers // self.workers_per_slot)

    @property
    def max_slots(self) -> int:
        """Slots that the run asks for: those it trains on, and the spares."""
        return self.max_workers // self.workers_per_slot + self.spare_slots


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints go (any fsspec URL), how often, and which are kept.

    The newest `keep_last` are kept, and with them every one whose step is a multiple of `keep_every_steps`.
    `every_steps` None saves only where a generation ends as planned and at the end of the run.
    """

    url: str = "./runs"
    every_steps: int | None = None
    keep_last: int = 2
    keep_every_steps: int | None = None


@dataclass(frozen=True)
class SnapshotSettings:
    """Snapshots in the memory of the run's nodes: what a lost node is recovered from without touching storage.

    Every rank's shard is copied into its node's memory every `every_steps` steps (None: as often as stays under
    `cost_limit` of the step time), and from there to `replicas` other nodes. With `parity` k instead, one node keeps
    the XOR of the shards of k others: any one node may be lost, for 1/k of a replica's memory. With `every_steps` given
    a step that is due waits for the snapshot before it to be complete; without, it is left out. `required` ends the run
    if a node has too little memory; otherwise that is reported, and the run continues with storage alone.
    """

    enabled: bool = True
    required: bool = False
    replicas: int = 1
    # 0 or the width of a stripe; replicas are then not made.
    parity: int = 0
    every_steps: int | None = None
    cost_limit: float = 0.01
    # Nodes with the same value of this Ray label may be lost together; replicas go elsewhere where they can.
    domain_label: str = "ray.io/availability-zone"


@dataclass(frozen=True)
class AnomalySettings:
    """Handling of steps with a non-finite (NaN or infinite) loss or gradient.

    "rollback" goes back to the newest good state and does the step with the next samples instead; "skip" leaves the
    weights as they are and continues with the next step; "stop" ends the run; "off" disables detection.
    More than `max_anomalies` within `window_steps` steps end it in any case. An fp16 overflow with a good loss is none,
    unless more than `max_overflows` come in a row while the loss scale cannot be lowered any further.
    """

    policy: Literal["stop", "skip", "rollback", "off"] = "rollback"
    max_anomalies: int = 5
    window_steps: int = 1000
    max_overflows: int = 5


@dataclass(frozen=True)
class StragglerSettings:
    """Handling of a rank whose own computation is slower than that of its peers.

    Medians over `window_steps` steps are compared, each rank's first `calibration_windows` with what comes later: a
    rank that is above `factor` times the median of its peers in `windows` windows running is a straggler. "report"
    reports it; "evict" also releases its slot if at least `min_workers` remain.
    """

    policy: Literal["off", "report", "evict"] = "report"
    factor: float = 1.05
    window_steps: int = 30
    windows: int = 3
    calibration_windows: int = 2
    # A generation's collectives that take so many times as long as they did at its beginning are reported.
    collective_factor: float = 1.5


@dataclass(frozen=True)
class CalibrationSettings:
    """Measurement of each node when it joins the run, before its workers begin: matrix products, memory, disk, and the
    connection to an idle node.

    "report" compares with the other nodes and reports what is slower: by `slow_factor` or more, and by `deviations` of
    the others' scatter. "refuse" also leaves a node that is `refuse_factor` times as slow, if `min_workers` remain.
    """

    policy: Literal["off", "report", "refuse"] = "off"
    slow_factor: float = 1.25
    refuse_factor: float = 2.0
    deviations: float = 4.0


@dataclass(frozen=True)
class GradientNoiseSettings:
    """Measurement of the gradient noise scale in every step whose number `every_steps` divides; None: in none.

    It reads each micro-batch's own gradient and changes nothing: neither the batch nor the learning rate follows from
    it.
    """

    every_steps: int | None = None


@dataclass(frozen=True)
class AuditSettings:
    """Audits that find ranks that compute wrong numbers (`core.data.audits`), in every step whose number `every_steps`
    divides, or whose memory changes, in every step; None: in none. A node that `strikes` audits have named is left,
    where enough workers remain.

    The run goes back to its newest state; with "agreed" to its newest checkpoint from before the last audit in which
    all ranks agreed, where it has one: the steps since then may have been computed wrongly, too.
    """

    every_steps: int | None = None
    strikes: int = 2
    rollback: Literal["newest", "agreed"] = "newest"


@dataclass(frozen=True)
class CommunicationSettings:
    """How the gradients of a step are averaged over the ranks, in place of the engine's own reduction.

    `semantics` is what the job grants (`core.policy.communication`); `strategy` one of those that it permits, or
    "auto": the one that takes least in steps of the run. Gradients travel in buckets of `bucket_mb` megabytes; with
    error feedback in one. `density` is the share of elements that "top_k" sends, `rank` that of "power_sgd"'s matrices.
    Others are tried again after `check_every_steps` steps and then after twice as many, where there is a choice and
    exchanges take as long as they did.

    With "local" ranks train in `islands` (None: each node is one), which exchange what they have learnt every
    `every_steps` steps, by an outer step of Nesterov momentum `outer_momentum` and rate `outer_lr`; with
    "streaming_diloco" in so many `fragments`, each of which is `overlap_steps` steps under way and leaves `mix` of an
    island's own weights (`core.checkpoint.rounds`).

    With "async" the gradient of a step is applied `staleness` steps later, and all that is under way every
    `every_steps` steps; with "parameter_server" as soon as all ranks' gradients of the step are there, and a rank takes
    the newest parameters, which lack at most so many steps.
    """

    semantics: str = "exact"
    strategy: str = "auto"
    bucket_mb: float = 25.0
    density: float = 0.01
    rank: int = 4
    check_every_steps: int = 200
    islands: int | None = None
    every_steps: int = 30
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 3
    overlap_steps: int = 0
    mix: float = 0.5
    staleness: int = 1


@dataclass(frozen=True)
class SinkSettings:
    """Where the run's records go besides the journal: a file at the absolute `path` on the controller's node.

    "jsonl": each record as a line, appended. "prometheus": the newest values, for node_exporter's textfile collector.
    """

    kind: Literal["jsonl", "prometheus"]
    path: str


@dataclass(frozen=True)
class WeightsSettings:
    """What a new run begins with instead of the values that the model was built with.

    `source` is a folder (path or URL, the same for every worker): a run or checkpoint, safetensors, a DeepSpeed
    checkpoint, a torch file. Names and shapes must be the model's, but for those that match a pattern (`head.*`):
    `allow_missing` keep the values they were built with, `allow_unexpected` are left out. `allow_pickle` reads
    DeepSpeed's pickles with a restricted unpickler.
    """

    source: str
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allow_pickle: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> WeightsSettings:
        """Inverse of `dataclasses.asdict`, with lists for tuples. Raises UsageError on unknown fields."""
        patterns = {key: tuple(data[key]) for key in ("allow_missing", "allow_unexpected") if key in data}
        return _build(cls, {**data, **patterns})


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run: everything but the user's function and its config.

    Batches count samples; None is taken from the DeepSpeed config that the user's script passes. `storage_url` holds
    the journal and the metrics.
    """

    run_id: str
    name: str = ""
    seed: int = 0
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    global_batch: int | None = None
    micro_batch: int | None = None
    # The global batch follows the number of workers, and `global_batch` is that of the most.
    adaptive_batch: AdaptiveBatch | None = None
    max_steps: int | None = None
    epochs: int | None = None
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    anomalies: AnomalySettings = field(default_factory=AnomalySettings)
    stragglers: StragglerSettings = field(default_factory=StragglerSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    gradient_noise: GradientNoiseSettings = field(default_factory=GradientNoiseSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    # None: gradients travel as the engine sends them.
    communication: CommunicationSettings | None = None
    sinks: tuple[SinkSettings, ...] = ()
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    # One process per node imports the libraries, and every worker of the node is a fork of it.
    fork_workers: bool = False
    # A worker's cores: all; those of its device's NUMA node; or its device's share of these.
    numa_binding: Literal["off", "node", "exclusive"] = "off"
    # What a worker's GPU reports while it trains is not watched, reported, or also left where it is unfit.
    device_faults: Literal["off", "report", "evict"] = "evict"
    # The kind of engine that every worker trains with, and its configuration: DeepSpeed's, or the options of FSDP2.
    engine: str = "deepspeed"
    engine_config: Mapping[str, Json] | None = None
    weights: WeightsSettings | None = None
    mesh: MeshSettings = field(default_factory=MeshSettings)
    storage_url: str = "./runs"

    def __post_init__(self) -> None:
        refused = refused_resources(self.resources_per_worker, self.numa_binding)
        if refused is not None:
            raise UsageError(refused)

    @property
    def worker_memory_bytes(self) -> int | None:
        """What Ray reserves of a node's memory for each worker; None: nothing."""
        return int(self.resources_per_worker.get(MEMORY, 0)) or None

    def __reduce__(self) -> tuple[Any, ...]:
        """As JSON also between processes: a node with an older release refuses a field that it does not know."""
        return RunSettings.from_json, (self.to_json(),)

    def to_json(self) -> dict[str, Json]:
        """Plain JSON types; `from_json` of it is equal to self."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> RunSettings:
        """Inverse of `to_json`. Raises UsageError on unknown fields (written by a newer version).

        Accepts `memory` and `deepspeed_config`, which is what 0.1 called `snapshots` and `engine_config`.
        """
        data = {_RENAMED.get(key, key): value for key, value in data.items()}
        parts = {
            "scaling": ScalingSettings, "checkpoint": CheckpointSettings, "snapshots": SnapshotSettings,
            "failures": FailureSettings, "anomalies": AnomalySettings,
            "stragglers": StragglerSettings, "mesh": MeshSettings,
            "calibration": CalibrationSettings, "gradient_noise": GradientNoiseSettings,
            "audit": AuditSettings,
        }  # fmt: skip
        values = {key: _build(parts[key], value) if key in parts else value for key, value in data.items()}
        values["sinks"] = tuple(_build(SinkSettings, sink) for sink in values.get("sinks") or ())
        for key, part in (("communication", CommunicationSettings), ("adaptive_batch", AdaptiveBatch)):
            if values.get(key) is not None:
                values[key] = _build(part, values[key])
        if values.get("weights") is not None:
            values["weights"] = WeightsSettings.from_json(values["weights"])
        return _build(cls, values)


# Old field -> present one: the `job.json` of a run outlives the release that wrote it.
_RENAMED = {"memory": "snapshots", "deepspeed_config": "engine_config"}


# Ray's name of a node's memory among resources, in bytes.
MEMORY = "memory"


def refused_resources(resources_per_worker: Mapping[str, float], numa_binding: str = "off") -> str | None:
    """Why a worker cannot have these Ray resources, or not with this `numa_binding`, as a sentence; None if it can."""
    gpus = resources_per_worker.get("GPU", 0)
    if gpus == 0 and numa_binding != "off":
        return f"numa_binding is {numa_binding}, which needs a GPU to be near to, but resources_per_worker has none"
    if gpus in (0, 1):
        return None
    why = "two ranks would share one device" if gpus < 1 else "a rank uses one device, the others would be idle"
    return (
        f"resources_per_worker.GPU is {gpus:g}, but must be 0 or 1: {why}; for several GPUs of one node use "
        "workers_per_slot"
    )


_T = TypeVar("_T")


def _build(cls: type[_T], values: Mapping[str, Json]) -> _T:
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"{cls.__name__} has no field {unknown[0]!r}: was it written by a newer version?")
    return cls(**values)

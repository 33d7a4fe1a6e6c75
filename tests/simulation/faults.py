"""The faults of a simulated run: a plan drawn from a seed, plain data that can be printed and shrunk by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from elastic.core.mesh import MeshSettings
from elastic.core.settings import (
    AnomalySettings,
    AuditSettings,
    CalibrationSettings,
    CheckpointSettings,
    FailureSettings,
    RunSettings,
    ScalingSettings,
    SnapshotSettings,
    StragglerSettings,
)

# Kind: (relative frequency, duration; None: permanent, or the kind does not end by itself).
_KINDS: dict[str, tuple[float, tuple[float, float] | None]] = {
    "kill_node": (4, (1.0, 40.0)),
    "freeze_node": (3, (0.5, 30.0)),
    "freeze_worker": (2, (0.5, 30.0)),
    "kill_worker": (4, None),
    "hang_worker": (2, None),
    "stubborn_worker": (1, None),
    "false_alarm": (3, None),
    "break_group": (3, None),
    "storage_down": (2, (1.0, 25.0)),
    "lemon": (1, None),
    "crash_controller": (3, (0.2, 12.0)),
    "add_node": (2, None),
    "nonsense": (2, None),
    "glitch": (2, None),
    "miscompute": (2, None),
    "slow_worker": (1, None),
    "failing_device": (1, None),
    "cut": (2, (1.0, 40.0)),
    "drain_node": (3, (0.5, 40.0)),
    "drain_cancelled": (1, (1.0, 20.0)),
    "drain_forever": (1, None),
    "other_run": (2, (1.0, 40.0)),
}
_PHASES = ("Waiting", "Joining", "Training", "Pausing", "Ending", "Closing")


@dataclass(frozen=True)
class Fault:
    """At `time` seconds after the start, or after the first entry into `phase`. `arg` in [0, 1) picks the victim."""

    kind: str
    time: float
    arg: float
    lasts_s: float = 0.0
    phase: str = ""


@dataclass
class Plan:
    """`liveness` plans leave a run no reason to end other than reaching its end."""

    settings: RunSettings
    faults: tuple[Fault, ...]
    nodes: int
    max_steps: int
    step_s: float
    save_every: int
    liveness: bool
    horizon_s: float
    patience_s: float = 2000.0
    place_s: tuple[float, float] = (0.1, 2.0)
    recovers: bool = True
    returns_early: bool = False
    usage: bool = False
    bugs: list[int] = field(default_factory=list)
    bugs_stay: bool = False
    slot_failures: float = 0.0
    lost_commits: float = 0.0
    corruption: float = 0.0
    lemon_rate: float = 0.3
    snapshot_every: int = 1
    lost_surveys: float = 0.0
    memory_failures: float = 0.0
    # Every restore reads this many parts of the state, each of which takes `part_s`.
    restore_parts: int = 0
    part_s: float = 0.0
    # Batches (numbered in the order of samples) that make a step's loss non-finite.
    bad_batches: frozenset[int] = frozenset()
    # A run that is resumed: its checkpoints (id, step) and the last generation of the attempt before.
    earlier: tuple[tuple[str, int], ...] = ()
    earlier_generation: int = 0
    # With fewer workers a step takes longer in proportion.
    linear: bool = False
    # What memory a worker has; None: it reports none.
    limit_bytes: int | None = None


def draw(seed: int) -> Plan:
    """The plan of one seed."""
    rng = Random(f"plan {seed}")
    liveness = rng.random() < 0.6
    scaling = _scaling(rng)
    horizon = rng.uniform(20, 90)
    faults = [_fault(rng, horizon) for _ in range(rng.choice((1, 2, 3, 5, 8, 13)))]
    plan = Plan(
        settings=RunSettings(
            f"run-{seed}",
            scaling=scaling,
            checkpoint=CheckpointSettings(),
            failures=_failures(rng, liveness),
            snapshots=SnapshotSettings(enabled=rng.random() < 0.7, replicas=rng.choice((0, 1, 1, 2))),
            anomalies=_anomalies(rng, liveness),
            stragglers=StragglerSettings(rng.choice(("report", "evict"))),
            audit=AuditSettings(strikes=1 + seed % 2),
        ),
        faults=tuple(faults),
        nodes=rng.randint(scaling.min_slots, scaling.max_slots + 1),
        max_steps=rng.randint(5, 50),
        step_s=rng.choice((0.2, 1.0, 2.0)),
        save_every=rng.choice((3, 10, 1000)),
        liveness=liveness,
        horizon_s=horizon,
        slot_failures=rng.choice((0.0, 0.0, 0.2)),
        lost_commits=rng.choice((0.0, 0.0, 0.2)),
        corruption=rng.choice((0.0, 0.0, 0.3)),
        snapshot_every=rng.choice((1, 1, 2, 5)),
        lost_surveys=rng.choice((0.0, 0.0, 0.2)),
        memory_failures=rng.choice((0.0, 0.0, 0.1)),
    )
    if liveness and rng.random() < 0.2:
        plan.bugs = [rng.randint(1, plan.max_steps)]
    if rng.random() < 0.25:
        first = rng.randint(0, plan.max_steps)
        plan.bad_batches = frozenset({first, first + rng.randint(0, 2), rng.randint(0, plan.max_steps)})
    if rng.random() < 0.3:
        # One failure that is aimed at a phase, so that short phases are hit in many runs too.
        kind = rng.choice(("kill_node", "kill_worker", "freeze_node", "crash_controller"))
        plan.faults += (Fault(kind, rng.choice((0.0, 0.1, 0.6)), rng.random(), 3.0, rng.choice(_PHASES)),)
    if rng.random() < 0.1:
        # The same failure repeatedly, without a lost worker.
        plan.faults += tuple(Fault("break_group", 0.1, rng.random(), phase="Training") for _ in range(3))
    if rng.random() < 0.2:
        steps = sorted({rng.randint(0, plan.max_steps) for _ in range(3)}, reverse=True)
        plan.earlier_generation = rng.randint(1, 9)
        plan.earlier = tuple((f"{step:06d}-{plan.earlier_generation}", step) for step in steps)
        # The earlier attempt has trained on the first ones.
        plan.bad_batches = frozenset(batch for batch in plan.bad_batches if batch >= steps[0])
    if not liveness:
        _ends(rng, plan)
    plan.faults += _outage(Random(f"outage {seed}"), horizon)
    plan.faults += _storage_cut(Random(f"storage {seed}"), horizon)
    plan.faults += _unwritten(Random(f"unwritten {seed}"), horizon)
    # Drawn from random streams of their own, like the faults above, so that the plans of older seeds do not change.
    parity = Random(f"parity {seed}").choice((0, 0, 0, 1, 2, 3))
    policy = Random(f"policy {seed}").choice(("eager", "eager", "measured", "patient"))
    # Of what divides both limits; most often 1.
    common = [cell for cell in (1, 1, 2, 3) if scaling.min_workers % cell == 0 == scaling.max_workers % cell]
    plan.settings = replace(
        plan.settings,
        mesh=_mesh(seed, common, scaling.max_workers),
        snapshots=replace(plan.settings.snapshots, parity=parity),
        scaling=replace(scaling, policy=policy),  # type: ignore[arg-type]
        calibration=CalibrationSettings(Random(f"calibration {seed}").choice(("off", "report", "refuse"))),
    )
    plan.limit_bytes = Random(f"memory {seed}").choice((None, *range(20_000, 160_000, 20_000)))
    return plan


def _outage(rng: Random, horizon: float) -> tuple[Fault, ...]:
    """In one run of four Ray's control store is lost for a while, and another fault happens in that time."""
    if rng.random() > 0.25:
        return ()
    begin, lasts = rng.uniform(0, horizon), rng.uniform(2.0, 40.0)
    kind = rng.choice(("kill_node", "kill_worker", "crash_controller", "freeze_node", "drain_node", "stubborn_worker"))
    within = Fault(kind, begin + rng.uniform(0.0, 0.7) * lasts, rng.random(), rng.uniform(1.0, 20.0))
    return Fault("control_store_away", begin, 0.0, lasts), within


def _storage_cut(rng: Random, horizon: float) -> tuple[Fault, ...]:
    """In one run of five a node loses its connection to storage, often until the end."""
    if rng.random() > 0.2:
        return ()
    return (Fault("storage_cut", rng.uniform(0, horizon), rng.random(), rng.choice((10.0, 100.0))),)


def _unwritten(rng: Random, horizon: float) -> tuple[Fault, ...]:
    """In one run of four the controller is killed before it has journaled what it has accepted: one message, or
    everything since its journal became unwritable, which may include the starts of generations."""
    if rng.random() > 0.25:
        return ()
    begin, down_s = rng.uniform(0, horizon), rng.uniform(0.2, 12.0)
    if rng.random() < 0.4:
        phase = rng.choice(("", *_PHASES))
        return (Fault("lose_message", rng.random() if phase else begin, 0.0, down_s, phase),)
    lasts = rng.uniform(2.0, 40.0)
    kinds = [rng.choice(("kill_node", "kill_worker", "break_group", "add_node", "glitch")) for _ in range(2)]
    within = [Fault(kind, begin + rng.uniform(0.0, 0.5) * lasts, rng.random(), 10.0) for kind in kinds]
    return (
        Fault("journal_away", begin, 0.0, lasts),
        *within,
        Fault("crash_controller", begin + rng.uniform(0.3, 1.0) * lasts, 0.9, down_s),
    )


def _ends(rng: Random, plan: Plan) -> None:
    """Reasons for a run to end early."""
    if rng.random() < 0.3:
        plan.faults += (Fault("stop", rng.uniform(0, plan.horizon_s), 0.0, phase=rng.choice(("", *_PHASES))),)
    if rng.random() < 0.3:
        plan.bugs, plan.bugs_stay = [rng.randint(1, plan.max_steps)], rng.random() < 0.6
        plan.usage = rng.random() < 0.2
    plan.recovers = rng.random() < 0.6 or plan.settings.failures.capacity_timeout_s is None
    plan.lemon_rate = 0.95
    plan.returns_early = rng.random() < 0.1
    plan.corruption = rng.choice((0.0, 0.3, 1.0))


def _mesh(seed: int, cells: Sequence[int], most: int) -> MeshSettings:
    """One cell for the whole run, or another one in each generation."""
    rng = Random(f"mesh {seed}")
    cell = rng.choice(cells)
    if rng.random() >= 0.4:
        return MeshSettings(sp=cell)
    shared = Random(f"tp {seed}").choice((1, 2, 3))
    if 1 < shared <= most:
        # With the fewest workers it may be that layers cannot be shared so.
        return MeshSettings(tp=shared, choices={"tp": (1, shared)})
    return MeshSettings(ep=max(cells), choices={"ep": tuple(sorted(set(cells)))})


def _scaling(rng: Random) -> ScalingSettings:
    per_slot = rng.choice((1, 1, 1, 2, 3))
    slots = rng.randint(1, 5)
    low = rng.randint(1, slots * per_slot)
    return ScalingSettings(low, slots * per_slot, per_slot, gather_s=rng.choice((0.0, 2.0, 5.0)))


def _failures(rng: Random, liveness: bool) -> FailureSettings:
    return FailureSettings(
        hang_floor_s=10.0, join_timeout_s=20.0, worker_start_timeout_s=15.0, drain_timeout_s=rng.choice((5.0, 20.0)),
        abort_timeout_s=rng.choice((1.0, 3.0)), retry_backoff_limit_s=10.0,
        storage_timeout_s=300.0 if liveness else rng.choice((10.0, 60.0)),
        user_error_retries=10**6 if liveness else rng.choice((0, 1, 2)),
        crash_streak=10**6 if liveness else rng.choice((0, 2, 5)),
        startup_retries=5 if liveness else rng.choice((0, 1, 3)),
        capacity_timeout_s=None if liveness else rng.choice((None, 10.0, 60.0)),
    )  # fmt: skip


def _anomalies(rng: Random, liveness: bool) -> AnomalySettings:
    if liveness:
        return AnomalySettings(rng.choice(("rollback", "rollback", "skip")), max_anomalies=10**6)
    return AnomalySettings(
        rng.choice(("rollback", "rollback", "skip", "stop")),
        max_anomalies=rng.choice((0, 1, 5)),
        window_steps=rng.choice((1, 10, 1000)),
    )


def _fault(rng: Random, horizon: float) -> Fault:
    kinds = tuple(_KINDS)
    kind = rng.choices(kinds, [_KINDS[k][0] for k in kinds])[0]
    span = _KINDS[kind][1]
    lasts = rng.uniform(*span) if span and rng.random() < 0.8 else (span[1] if span else 0.0)
    if rng.random() < 0.35:
        return Fault(kind, rng.choice((0.0, 0.1, 1.0)) * rng.random(), rng.random(), lasts, rng.choice(_PHASES))
    return Fault(kind, rng.uniform(0, horizon), rng.random(), lasts)

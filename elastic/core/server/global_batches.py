"""Which gradients make which update of a parameter server: `step(state, event) -> (state, answer)`, pure.

The micro-batches of a run are numbered in the order of its samples; a *global batch* is `micros` of them. Workers ask
for one after another (a *lease*) and compute its gradient from parameters that may be some updates old.

- An update is made exactly when one whole global batch of gradients has arrived (GBA, arXiv 2205.11048), so that batch
  size and learning rate mean what they mean in synchronous training. GBA weighs gradients that are too old with zero,
  and loses their samples; here they are computed again.
- A worker's *clock* is the global batch of its lease. No lease is given more than `staleness` batches ahead of the
  slowest living worker (SSP, Ho et al., NIPS 2013); a lost worker's clock goes with it, and its lease is given to the
  next who asks.
- A gradient counts only if at most `staleness` updates were made since the parameters that it was computed from.

With staleness 0 every update is that of synchronous training: the same samples, from the parameters before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import assert_never

# Of the cuts that the shards keep, and whose counterpart is here.
KEPT_CUTS = 2


@dataclass(frozen=True)
class Lease:
    """A micro-batch to compute. `number` is never used twice: what was sent under an older one does not count."""

    micro: int
    number: int
    version: int  # as many updates, at least, are in the parameters that its gradient is computed from


@dataclass(frozen=True)
class Part:
    """A gradient that is in an update."""

    micro: int
    number: int


Batch = tuple[Part, ...]


def rank_part(step: int, rank: int, ranks: int) -> Part:
    """Where each rank has its own micro-batch in every step, and a micro-batch is computed once."""
    return Part(step * ranks + rank, 0)


def rank_batch(step: int, ranks: int) -> Batch:
    """The update of a step is made of the gradients of all ranks."""
    return tuple(rank_part(step, rank, ranks) for rank in range(ranks))


@dataclass(frozen=True)
class Cut:
    """Which samples are in the parameters of a version: every micro-batch below `next_micro`, less `missing`."""

    version: int
    next_micro: int
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Batches:
    """Of a run of `total` updates. What is kept is bounded by the workers, `staleness` and `micros`."""

    micros: int
    staleness: int
    total: int
    cut_every: int = 0  # updates; 0: never
    version: int = 0
    next_micro: int = 0
    next_number: int = 1
    returned: tuple[int, ...] = ()  # leases of lost workers, ascending
    members: tuple[str, ...] = ()
    leases: Mapping[str, Lease] = field(default_factory=dict)  # of members
    arrived: Batch = ()  # of the next update
    # By the version before them: those that not all shards are known to have applied.
    batches: Mapping[int, Batch] = field(default_factory=dict)
    # The newest lease of each member whose gradient counted: an answer that was lost is given again.
    counted: Mapping[str, int] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Members:
    """These workers live; all others are lost. A worker that comes back has another name."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A worker wants a micro-batch. Every shard has applied, on all its copies, `seen` updates."""

    worker: str
    seen: int


@dataclass(frozen=True)
class Pushed:
    """Every shard has, on all its copies, the gradient of this lease."""

    worker: str
    number: int


Event = Members | Asked | Pushed


@dataclass(frozen=True)
class Given:
    """Compute this, from parameters with `lease.version` updates; shards that lag behind need `batches`."""

    lease: Lease
    batches: Mapping[int, Batch]


@dataclass(frozen=True)
class Wait:
    why: str


@dataclass(frozen=True)
class Counted:
    version: int


@dataclass(frozen=True)
class Finished:
    version: int
    batches: Mapping[int, Batch]


@dataclass(frozen=True)
class Unknown:
    """The worker was declared lost, or the lease is not its own."""

    why: str


Answer = Given | Wait | Counted | Finished | Unknown


def begin(micros: int, staleness: int, total: int, cut_every: int = 0, cut: Cut | None = None) -> Batches:
    """A run's state, also one that continues from a cut."""
    if micros < 1 or staleness < 0 or total < 1:
        raise ValueError(f"{micros} micro-batches, staleness {staleness} and {total} updates make no run")
    state = Batches(micros, staleness, total, cut_every)
    if cut is None:
        return state
    return replace(state, version=cut.version, next_micro=cut.next_micro, returned=cut.missing)


def step(state: Batches, event: Event) -> tuple[Batches, Answer]:
    match event:
        case Members():
            return _members(state, event), Counted(state.version)
        case Asked():
            return _asked(state, event)
        case Pushed():
            return _pushed(state, event)
        case _:
            assert_never(event)


def slowest(state: Batches) -> tuple[int, str] | None:
    """The least clock of all who hold a lease, and whose it is."""
    return min(((lease.micro // state.micros, name) for name, lease in state.leases.items()), default=None)


def _members(state: Batches, event: Members) -> Batches:
    lost = [lease.micro for worker, lease in state.leases.items() if worker not in event.workers]
    return replace(
        state,
        members=event.workers,
        returned=tuple(sorted([*state.returned, *lost])),
        leases={worker: lease for worker, lease in state.leases.items() if worker in event.workers},
        counted={worker: number for worker, number in state.counted.items() if worker in event.workers},
    )


def _asked(state: Batches, event: Asked) -> tuple[Batches, Answer]:
    if event.worker not in state.members:
        return state, Unknown(f"worker {event.worker} is not a member")
    held = {version: batch for version, batch in state.batches.items() if version >= event.seen}
    state = replace(state, batches=held)
    if state.version >= state.total:
        return state, Finished(state.version, held)
    lease = state.leases.get(event.worker)
    # It asks again because an answer was lost: it computes once more, under a new number.
    micro = _next(state) if lease is None else lease.micro
    if micro is None:
        return state, Wait("every micro-batch of the run is being computed")
    floor = slowest(state)
    if floor is not None and micro // state.micros - floor[0] > state.staleness:
        clock, worker = floor
        return state, Wait(f"global batch {micro // state.micros} is too far ahead of batch {clock} of worker {worker}")
    if micro in state.returned:
        state = replace(state, returned=tuple(other for other in state.returned if other != micro))
    elif lease is None:
        state = replace(state, next_micro=state.next_micro + 1)
    return _given(state, event.worker, micro)


def _next(state: Batches) -> int | None:
    if state.returned:
        return state.returned[0]
    return state.next_micro if state.next_micro < state.total * state.micros else None


def _given(state: Batches, worker: str, micro: int) -> tuple[Batches, Answer]:
    lease = Lease(micro, state.next_number, state.version)
    state = replace(state, next_number=lease.number + 1, leases={**state.leases, worker: lease})
    return state, Given(lease, state.batches)


def _pushed(state: Batches, event: Pushed) -> tuple[Batches, Answer]:
    lease = state.leases.get(event.worker)
    if lease is None or lease.number != event.number:
        if state.counted.get(event.worker) == event.number:
            return state, Counted(state.version)
        return state, Unknown(f"worker {event.worker} does not hold lease {event.number}")
    if state.version - lease.version > state.staleness:
        # Others wait for this clock meanwhile: the second time it cannot come too late.
        return _given(state, event.worker, lease.micro)
    state = replace(
        state,
        leases={worker: other for worker, other in state.leases.items() if worker != event.worker},
        counted={**state.counted, event.worker: event.number},
        arrived=(*state.arrived, Part(lease.micro, lease.number)),
    )
    if len(state.arrived) == state.micros:
        state = _updated(state)
    return state, Counted(state.version)


def _updated(state: Batches) -> Batches:
    # In the order of the samples, whoever was first: the sum of floats is the same in every run at staleness 0.
    batch = tuple(sorted(state.arrived, key=lambda part: part.micro))
    batches, version = {**state.batches, state.version: batch}, state.version + 1
    state = replace(state, version=version, arrived=(), batches=batches)
    if not state.cut_every or version % state.cut_every:
        return state
    missing = sorted([*state.returned, *(lease.micro for lease in state.leases.values())])
    cut = Cut(version, state.next_micro, tuple(missing))
    return replace(state, cuts=(*state.cuts, cut)[-KEPT_CUTS:])

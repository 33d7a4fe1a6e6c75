"""The specification of a generation that all its members get, and where the snapshots of each go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.core.actions import BeginGeneration
from elastic.core.checkpoint.parity import place_parity
from elastic.core.checkpoint.snapshots import place_replicas
from elastic.core.generation_spec import BatchSettings, GenerationSpec, MemoryPlan
from elastic.core.settings import RunSettings
from elastic.runtime.messages import NodeFacts
from elastic.transport.handshake import Address

# Nodes that may take the place of one that does not take a rank's replicas.
_SPARES = 2


def shared_spec(
    settings: RunSettings,
    action: BeginGeneration,
    content: Mapping[int, int] | None = None,
    nodes: Sequence[str] = (),
) -> GenerationSpec:
    """As all ranks get it; each makes its own by `of_rank`. `content` is what repeated steps must read, `nodes[rank]`
    is the rank's node."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    mesh = settings.mesh.shape(action.axes)
    return GenerationSpec(
        run_id=settings.run_id,
        generation=action.generation,
        rank=0,
        world_size=len(action.members),
        seed=settings.seed,
        sp=mesh.sp,
        tp=mesh.tp,
        tp_sizes=settings.mesh.tp_sizes,
        any_tp=settings.mesh.any_tp,
        ep=mesh.ep,
        ep_sizes=settings.mesh.ep_sizes,
        pp=mesh.pp,
        reports_memory=bool(settings.mesh.choices),
        worker_memory_bytes=settings.worker_memory_bytes,
        max_world_size=settings.scaling.max_workers,
        batch=BatchSettings.of(settings),
        checkpoint=action.checkpoint,
        checkpoint_every_steps=settings.checkpoint.every_steps,
        engine=settings.engine,
        weights=settings.weights,
        engine_config=settings.engine_config,
        skips=action.skips,
        stops_at_start=action.stops_at_start,
        # A run that begins anew may have been given other data.
        content=(content or {}) if action.checkpoint is not None else {},
        anomalies=settings.anomalies if settings.anomalies.policy != "off" else None,
        noise_every_steps=settings.gradient_noise.every_steps,
        audit_every_steps=settings.audit.every_steps,
        communication=settings.communication,
        nodes=() if settings.communication is None else tuple(numbers[node] for node in nodes),
        collective_timeout_s=settings.failures.collective_timeout_s,
    )


def memory_plans(
    settings: RunSettings, nodes: Sequence[str], known: Mapping[str, NodeFacts], axes: Mapping[str, int] | None = None
) -> tuple[MemoryPlan | None, ...]:
    """By rank; `nodes[rank]` is the rank's node, `known` has the facts of every node; `axes` are of a mesh that
    changes."""
    memory = settings.snapshots
    domains = {node: facts.domain for node, facts in known.items() if facts.domain}
    addresses = {node: facts.memory for node, facts in known.items()}

    def plan(holders: Sequence[str], stripe: tuple[int, ...] = (), spare: Sequence[str] = ()) -> MemoryPlan:
        return MemoryPlan(
            _known(holders, addresses), stripe, memory.every_steps, memory.cost_limit, memory.required,
            _known(spare, addresses),
        )  # fmt: skip

    if memory.parity:
        shared = place_parity(nodes, memory.parity, domains)
        # The parity of a single rank is a replica.
        striped = [(s.holder, s.ranks if len(s.ranks) > 1 else ()) if s is not None else None for s in shared]
        by_stripe = {one: plan((one[0],), one[1]) if one else plan(()) for one in dict.fromkeys(striped)}
        return tuple([by_stripe[one] for one in striped])
    # The ranks of a node share one. The next best nodes follow those that get the replicas. Parity has none: all ranks
    # of a stripe would have to move.
    own = tuple(dict.fromkeys(nodes))
    mesh = settings.mesh.shape(axes or {}).mesh(len(nodes))
    lanes: dict[str, set[int]] = {node: set() for node in own}
    for rank, node in enumerate(nodes):
        lanes[node].add(mesh.part(rank)[0])
    shares = {node: frozenset(found) for node, found in lanes.items()}
    ringed = place_replicas(own, memory.replicas, domains, _SPARES, shares if mesh.part(0)[1] > 1 else None)
    count = memory.replicas
    by_node = {node: plan(ring[:count], spare=ring[count:]) for node, ring in zip(own, ringed, strict=True)}
    return tuple([by_node[node] for node in nodes])


def _known(nodes: Sequence[str], addresses: Mapping[str, Address]) -> tuple[Address, ...]:
    """The addresses of those nodes that have one."""
    return tuple(addresses[node] for node in nodes if node in addresses)

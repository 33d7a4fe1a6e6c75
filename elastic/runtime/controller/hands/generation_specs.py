"""The specification for each member of a generation: batch settings, and where its snapshots go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.core.actions import BeginGeneration
from elastic.core.checkpoint.parity import place_parity
from elastic.core.checkpoint.snapshots import place_replicas
from elastic.core.generation_spec import BatchSettings, GenerationSpec, MemoryPlan
from elastic.core.settings import RunSettings
from elastic.runtime.controller.hands.snapshot_directory import targets_of
from elastic.runtime.messages import NodeFacts


def generation_specs(
    settings: RunSettings,
    action: BeginGeneration,
    plans: Sequence[MemoryPlan | None],
    content: Mapping[int, int] | None = None,
) -> tuple[GenerationSpec, ...]:
    """By rank; `plans` are those of the ranks' snapshots, `content` is what repeated steps must read."""
    batch = BatchSettings(settings.global_batch, settings.micro_batch, settings.max_steps, settings.epochs)
    return tuple(
        GenerationSpec(
            run_id=settings.run_id,
            generation=action.generation,
            rank=rank,
            world_size=len(action.members),
            seed=settings.seed,
            max_world_size=settings.scaling.max_workers,
            batch=batch,
            checkpoint=action.checkpoint,
            checkpoint_every_steps=settings.checkpoint.every_steps,
            engine=settings.engine,
            weights=settings.weights,
            engine_config=settings.engine_config,
            memory=plan,
            skips=action.skips,
            stops_at_start=action.stops_at_start,
            # A run that begins anew may have been given other data.
            content=(content or {}) if action.checkpoint is not None else {},
            anomalies=settings.anomalies if settings.anomalies.policy != "off" else None,
            collective_timeout_s=settings.failures.collective_timeout_s,
        )
        for rank, plan in enumerate(plans)
    )


def memory_plans(
    settings: RunSettings, nodes: Sequence[str], known: Mapping[str, NodeFacts]
) -> tuple[MemoryPlan | None, ...]:
    """By rank; `nodes[rank]` is the rank's node, `known` has the facts of every node."""
    memory = settings.snapshots
    domains = {node: facts.domain for node, facts in known.items() if facts.domain}
    placed: Sequence[tuple[str, ...]]
    stripes: Sequence[tuple[int, ...]] = [()] * len(nodes)
    if memory.parity:
        shared = place_parity(nodes, memory.parity, domains)
        placed = [(stripe.holder,) if stripe is not None else () for stripe in shared]
        # The parity of a single rank is a replica.
        stripes = [stripe.ranks if stripe is not None and len(stripe.ranks) > 1 else () for stripe in shared]
    else:
        placed = place_replicas(nodes, memory.replicas, domains)
    targets = targets_of(placed, {node: facts.memory for node, facts in known.items()})
    return tuple(
        MemoryPlan(where, stripe, memory.every_steps, memory.cost_limit, memory.required)
        for where, stripe in zip(targets, stripes, strict=True)
    )

"""The engine's own reduction of gradients replaced by the one that the job asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.checkpoint.shares import Shares
from elastic.comm.server.worker import FlatModel
from elastic.comm.strategies.bounded_staleness import BoundedStaleness
from elastic.comm.strategies.local import IslandGroups, LocalUpdates
from elastic.comm.strategies.parameter_server import Access, ServedUpdates
from elastic.comm.strategies.reduction import Reduction
from elastic.core.checkpoint.rounds import PARAMETER_SERVER, islands_of
from elastic.core.errors import UsageError
from elastic.core.policy.communication import refused_communication, refused_in_rounds
from elastic.core.policy.hops import Islands
from elastic.engines.base import Engine
from elastic.training.scope import GenerationScope
from elastic.transport.handshake import Address


def reduce_gradients(
    engine: Engine, scope: GenerationScope, connects_to: Callable[[Sequence[Address]], None] = lambda _: None
) -> Shares:
    """Of a new engine, before its first step. Returns what the reduction keeps from step to step; nothing where the
    engine reduces itself. Raises UsageError where the configuration does not allow it. Collective. `connects_to`:
    connections to these addresses are to end with the groups'."""
    spec = scope.spec
    asked = spec.communication
    if asked is None:
        return Shares()
    refused = refused_communication(asked, spec.engine, spec.tp, spec.ep, spec.pp)
    if refused is None and isinstance(engine.sums, str):
        refused = f"communication: {engine.sums}; leave communication out, or use ZeRO stage 0 or 1 in fp32 or bf16"
    audited, measured = spec.audit_every_steps is not None, spec.noise_every_steps is not None
    policy = "off" if spec.anomalies is None else spec.anomalies.policy
    refused = refused or refused_in_rounds(asked, spec.sp, audited, measured, policy)
    if refused is not None or isinstance(engine.sums, str):
        raise UsageError(refused or "")
    nodes = spec.nodes or (0,) * spec.world_size
    shapes = {name: tuple(leaf.shape) for name, leaf in engine.leaves().items() if leaf.numel()}
    watched = policy != "off"
    if asked.strategy == PARAMETER_SERVER:
        found = scope.coordinator.shard_server()
        if found is None:
            raise UsageError(
                "communication.strategy: parameter_server is for runs on a cluster, whose nodes have the servers; use "
                "bounded_staleness here"
            )
        engine.sums.reduce_by(lambda gradients: None)
        engine.sums.updates_by(lambda own: served.update(own), clips=False)
        model = FlatModel(engine.module, engine.native.optimizer)
        access = Access(*found, scope.check, connects_to)
        clip = float(engine.native.gradient_clipping())
        served = ServedUpdates(
            asked, spec.generation, nodes, engine.data_group, engine.ledger, watched, model, access, clip
        )
        return served
    if asked.semantics == "async":
        late = BoundedStaleness(asked, engine.data_group, engine.ledger, watched, engine.sums.updates_by)
        engine.sums.reduce_by(late.reduce)
        return late
    if asked.semantics == "local":
        groups = IslandGroups.make(islands_of(nodes, asked.islands), engine.data_group)
        local = LocalUpdates(asked, groups, shapes, engine.device, engine.ledger, watched)
        engine.sums.reduce_by(local.reduce)
        engine.sums.after_update(local.updated)
        return local
    reduction = Reduction(asked, engine.data_group, engine.device, engine.ledger, Islands.of(nodes), shapes)
    engine.sums.reduce_by(reduction.reduce)
    return reduction.feedback or Shares()

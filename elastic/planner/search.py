"""The search: every mesh and strategy that a cluster allows, fastest first, and why the others are refused.

Exhaustive and deterministic. Two things are not tried because they cannot win: recomputation and offload only save
memory, so the first combination that fits ends the row; a micro-batch that fits with no combination ends the larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.errors import UsageError
from elastic.planner.cost_model import CostModel, TimeBreakdown
from elastic.planner.devices import Cluster
from elastic.planner.memory_model import MemoryBreakdown, MemoryModel
from elastic.planner.model_shape import ModelShape
from elastic.planner.strategy import OFFLOAD, RECOMPUTE, Mesh, Strategy
from elastic.planner.workload import workload

AXES = ("dp", "tp", "pp", "sp", "ep")
_GIB = 2**30
_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class PlanningFacts:
    """What a plan is made from. `axes` may be larger than 1; `spare_ranks`: how many ranks may be left idle."""

    model: ModelShape
    cluster: Cluster
    global_batch: int
    axes: tuple[str, ...] = AXES
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    spare_ranks: int = 0

    def __post_init__(self) -> None:
        unknown = [axis for axis in self.axes if axis not in AXES]
        if unknown:
            raise UsageError(f"unknown axis {unknown[0]!r}; the axes of a mesh are {', '.join(AXES)}")
        if self.global_batch < 1:
            raise UsageError(f"the global batch must be at least 1 sample, not {self.global_batch}")


@dataclass(frozen=True)
class Candidate:
    """One mesh and strategy. `refusal` is empty when it can run, else the kind of obstacle, for grouping.

    `utilisation`: FLOPs that the model needs (without recomputation) over what the ranks' peak rates would allow.
    """

    strategy: Strategy
    mesh: Mesh
    memory: MemoryBreakdown | None
    time: TimeBreakdown | None
    reason: str
    refusal: str = ""
    utilisation: float = 0.0


class _Refused(NamedTuple):
    kind: str
    reason: str


@dataclass(frozen=True)
class Planner:
    """Ranks what a cluster can do for a model. `cost` None takes the constants fitted on published steps."""

    memory: MemoryModel = field(default_factory=MemoryModel)
    cost: CostModel | None = None

    def rank(self, facts: PlanningFacts) -> tuple[Candidate, ...]:
        """Those that can run, fastest first (then least memory), then the refused ones in the order of the search."""
        found = list(self._candidates(facts))
        can = [one for one in found if not one.refusal]
        return (*sorted(can, key=_order), *(one for one in found if one.refusal))

    def evaluate(self, facts: PlanningFacts, mesh: Mesh, strategy: Strategy) -> Candidate:
        """One candidate, whether the search would try it or not."""
        obstacle = _mesh_obstacle(facts, mesh) or _strategy_obstacle(facts, mesh, strategy)
        if obstacle is not None:
            return Candidate(strategy, mesh, None, None, obstacle.reason, obstacle.kind)
        memory = self.memory.peak(facts.model, strategy, mesh)
        obstacle = _memory_obstacle(facts.cluster, strategy, memory)
        if obstacle is not None:
            return Candidate(strategy, mesh, memory, None, obstacle.reason, obstacle.kind)
        cost = self.cost or CostModel(facts.cluster)
        work = workload(facts.model, strategy, mesh, self.memory.dtypes)
        time = cost.step(work)
        rate = work.model_flops / time.total_s / (mesh.world_size * facts.cluster.device.peak_flops)
        return Candidate(strategy, mesh, memory, time, _summary(facts.cluster, memory, time, rate), utilisation=rate)

    def _candidates(self, facts: PlanningFacts) -> Iterator[Candidate]:
        for mesh in meshes(facts):
            obstacle = _mesh_obstacle(facts, mesh)
            if obstacle is not None:
                plain = Strategy(global_batch=facts.global_batch)
                yield Candidate(plain, mesh, None, None, obstacle.reason, obstacle.kind)
                continue
            for stage in facts.zero_stages:
                yield from self._stage(facts, mesh, stage)

    def _stage(self, facts: PlanningFacts, mesh: Mesh, stage: int) -> Iterator[Candidate]:
        for micro in _micro_batches(facts.global_batch, mesh.dp):
            plain = Strategy(stage, facts.global_batch, micro)
            for strategy in _savings(facts, plain):
                one = self.evaluate(facts, mesh, strategy)
                if one.refusal not in ("memory", "host memory"):
                    break
            yield one
            if one.refusal:
                return


def meshes(facts: PlanningFacts) -> Iterator[Mesh]:
    """Every factorisation of every world size that leaves at most `spare_ranks` idle, largest worlds first."""
    size = facts.cluster.size
    for world in range(size, max(0, size - facts.spare_ranks - 1), -1):
        for tp in _sizes("tp", world, facts):
            for pp in _sizes("pp", world // tp, facts):
                for sp in _sizes("sp", world // tp // pp, facts):
                    dp = world // tp // pp // sp
                    if dp == 1 or "dp" in facts.axes:
                        for ep in _sizes("ep", dp * sp, facts):
                            yield Mesh(dp, tp, pp, sp, ep)


def _sizes(axis: str, limit: int, facts: PlanningFacts) -> Sequence[int]:
    """Divisors of `limit` that can make sense on this axis. tp and sp talk in every layer: they stay inside a node."""
    if axis not in facts.axes or (axis == "ep" and facts.model.experts == 1):
        return (1,)
    top = {"tp": facts.cluster.per_node, "sp": facts.cluster.per_node, "pp": facts.model.layers}.get(axis, limit)
    return [size for size in range(1, min(limit, top) + 1) if limit % size == 0]


def _micro_batches(global_batch: int, dp: int) -> Iterator[int]:
    """Powers of two up to a rank's share, and 1 where there is none, so that the refusal is seen."""
    micro = 1
    while micro == 1 or (micro <= _LARGEST_MICRO_BATCH and dp * micro <= global_batch):
        yield micro
        micro *= 2


def _savings(facts: PlanningFacts, plain: Strategy) -> Iterator[Strategy]:
    """From the fastest to the thriftiest."""
    for offload in OFFLOAD:
        for recompute in RECOMPUTE:
            if recompute == "selective" and facts.model.fused_attention:
                continue
            strategy = Strategy(plain.zero_stage, plain.global_batch, plain.micro_batch, recompute, offload)
            if _offload_obstacle(strategy) is None:
                yield strategy


def _mesh_obstacle(facts: PlanningFacts, mesh: Mesh) -> _Refused | None:
    model, cluster = facts.model, facts.cluster
    heads = mesh.tp * mesh.sp
    if mesh.world_size > cluster.size:
        return _Refused("ranks", f"{mesh} needs {mesh.world_size} ranks, the cluster has {cluster.size}")
    if mesh.tp * mesh.sp > cluster.per_node:
        return _Refused("node", f"tp{mesh.tp} x sp{mesh.sp} does not fit into a node of {cluster.per_node} devices")
    if model.heads % heads or model.kv_heads % heads:
        what = f"{model.heads} heads and {model.kv_heads} key/value heads"
        return _Refused("heads", f"{what} cannot be cut into tp{mesh.tp} x sp{mesh.sp} equal parts")
    if model.sequence % mesh.sp:
        return _Refused("sequence", f"a sequence of {model.sequence} tokens cannot be cut into sp{mesh.sp} parts")
    if mesh.pp > model.layers:
        return _Refused("layers", f"pp{mesh.pp} needs {mesh.pp} layers, the model has {model.layers}")
    if mesh.pp > 1 and mesh.sp > 1:
        return _Refused("pipeline with sp", "DeepSpeed's pipeline engine has no sequence parallelism")
    if mesh.data_size % mesh.ep or model.experts % mesh.ep:
        return _Refused("experts", f"ep{mesh.ep} divides not both {mesh.data_size} ranks and {model.experts} experts")
    return None


def _strategy_obstacle(facts: PlanningFacts, mesh: Mesh, strategy: Strategy) -> _Refused | None:
    samples, share = f"a global batch of {facts.global_batch}", mesh.dp * strategy.micro_batch
    if facts.global_batch < mesh.dp:
        return _Refused("batch", f"{samples} leaves some of dp{mesh.dp} without a sample")
    if mesh.pp > 1 and facts.global_batch % share:
        # Without a pipeline samples are dealt unevenly and the gradient stays that of the whole batch.
        return _Refused("batch", f"{samples} is no multiple of dp{mesh.dp} x micro-batch {strategy.micro_batch}")
    if mesh.pp > 1 and strategy.zero_stage > 1:
        return _Refused("pipeline with ZeRO", "DeepSpeed's pipeline engine takes ZeRO stages 0 and 1 only")
    if strategy.zero_stage and mesh.data_size == 1:
        return _Refused("nothing to shard over", f"ZeRO-{strategy.zero_stage} needs more than one data-parallel rank")
    return _offload_obstacle(strategy)


def _offload_obstacle(strategy: Strategy) -> _Refused | None:
    if strategy.offload == "optimizer" and strategy.zero_stage < 1:
        return _Refused("offload", "offloading the optimizer needs ZeRO-1 or higher")
    if strategy.offload == "parameters" and strategy.zero_stage < 3:
        return _Refused("offload", "offloading parameters needs ZeRO-3")
    return None


def _memory_obstacle(cluster: Cluster, strategy: Strategy, memory: MemoryBreakdown) -> _Refused | None:
    room = cluster.device.memory_bytes
    if memory.total > room:
        part = max(("weights", "optimizer", "gradients", "activations", "logits"), key=lambda one: getattr(memory, one))
        need = f"{memory.total / _GIB:.1f} GiB of {room / _GIB:.1f}"
        how = f"with recompute {strategy.recompute} and offload {strategy.offload}"
        largest = f"largest part: {part} {getattr(memory, part) / _GIB:.1f} GiB"
        return _Refused("memory", f"needs {need} {how}; {largest}")
    host = cluster.host_memory_bytes
    if host and memory.offload * cluster.per_node > host:
        need = f"{memory.offload * cluster.per_node / _GIB:.0f} GiB of {host / _GIB:.0f}"
        return _Refused("host memory", f"offloading needs {need} host memory per node")
    return None


def _summary(cluster: Cluster, memory: MemoryBreakdown, time: TimeBreakdown, rate: float) -> str:
    spare = (cluster.device.memory_bytes - memory.total) / _GIB
    lost = (
        f"communication {time.exposed_s / time.total_s:.0%} and bubble {time.bubble_s / time.total_s:.0%} of the step"
    )
    return f"{spare:.1f} GiB to spare; {rate:.0%} of the peak rate; {lost}"


def _order(one: Candidate) -> tuple[float, int, Mesh, Strategy]:
    assert one.time is not None
    assert one.memory is not None
    return (round(one.time.total_s, 9), one.memory.total, one.mesh, one.strategy)


def refusals(candidates: Iterable[Candidate]) -> dict[str, tuple[int, Candidate]]:
    """Per kind of obstacle: how many candidates met it, and the first. Kinds that stopped most come first."""
    groups: dict[str, list[Candidate]] = {}
    for one in candidates:
        if one.refusal:
            groups.setdefault(one.refusal, []).append(one)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return {kind: (len(members), members[0]) for kind, members in ordered}

"""Step time of a workload on a cluster, by part; the constants behind it, and their fit from measured steps.

One layer costs `((device work + transfers)^2 + (launches + latencies)^2)^(1/2)`: kernels and collectives are queued by
the host while the device works, and the slower of the two sets the pace, with a knee where they are close. A step
under 1F1B costs (m - 1) passes of the slowest stage, one pass of the last stage, and the bubble of (p - 1)/v passes
(Narayanan et al., arXiv 2104.04473, section 2.2), then what is exposed of the gradients' reduction, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import hypot

from elastic.planner.devices import Cluster
from elastic.planner.least_squares import Prior, fit_relative
from elastic.planner.links import Link, p_norm, steps, wire_bytes
from elastic.planner.strategy import Mesh
from elastic.planner.workload import Collective, Workload

# How sharply concurrent work and communication merge: 1 would be their sum (AdaptDL, arXiv 2008.12260, section 3.2).
_OVERLAP_KNEE = 3.0
# Share of memory bandwidth that the fused optimizer reaches: it reads and writes long arrays.
_OPTIMIZER_FRACTION = 0.8
# Bytes per second at which a host updates offloaded states (DeepSpeedCPUAdam, one socket): an assumption.
_HOST_OPTIMIZER_BYTES_PER_S = 100e9


@dataclass(frozen=True)
class Constants:
    """What is measured rather than derived: shares of the device's rates, and seconds.

    `launch_s`: host time to queue one layer's forward pass. `alpha_s`: one latency of a collective. `step_s`: once
    per step, whatever its size. `memory_fraction` relates saved activations to all bytes moved, so it is below one
    even where kernels reach full bandwidth. The defaults are the fit on vTrain's 109 multi-node steps (512 A100).
    """

    matmul_fraction: float = 0.877
    memory_fraction: float = 0.330
    launch_s: float = 1.41e-3
    alpha_s: float = 13.2e-6
    intra_fraction: float = 0.959
    node_fraction: float = 0.949
    step_s: float = 0.0304


# What is known before a run is measured: GEMMs reach 60 to 90 % of the best shape, saved bytes are about half of those
# moved, a layer is some hundred kernels of 10 us, collectives reach 75 % of a link's rate.
PRIORS = (
    Prior(0.75, 0.15),
    Prior(0.7, 0.4),
    Prior(1e-3, 0.5),
    Prior(2e-5, 0.8),
    Prior(0.77, 0.3),
    Prior(0.8, 0.6),
    Prior(0.03, 0.2),
)


def priors_around(constants: Constants, spread: float = 0.3) -> tuple[Prior, ...]:
    """Priors for a fit on few steps of one's own: `constants`, each give or take a factor e^`spread`."""
    return tuple(Prior(value, spread) for value in vars(constants).values())


@dataclass(frozen=True)
class CollectiveTime:
    """One row of a step as the collective ledger would have it. `sent_bytes` counts one rank's bytes on the wire."""

    operation: str
    axis: str
    sent_bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of one step."""

    compute_s: float = 0.0
    collectives: tuple[CollectiveTime, ...] = ()
    bubble_s: float = 0.0
    optimizer_s: float = 0.0
    offload_s: float = 0.0
    fixed_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return sum(one.exposed_s for one in self.collectives)

    @property
    def total_s(self) -> float:
        own = self.compute_s + self.bubble_s + self.optimizer_s + self.offload_s + self.fixed_s
        return own + self.exposed_s


@dataclass(frozen=True)
class CostModel:
    """`links` overrides what follows from the cluster for an axis (dp, tp, pp, sp, ep) by a measured link."""

    cluster: Cluster
    constants: Constants = Constants()
    links: Mapping[str, Link] = field(default_factory=dict)

    def link(self, axis: str, mesh: Mesh) -> Link:
        """The slowest link class inside a group of `axis`. Rings of several groups share the network of a node."""
        if axis in self.links:
            return self.links[axis]
        constants, per_node = self.constants, self.cluster.per_node
        ranks, stride = mesh.group(axis)
        inner = min(ranks, max(1, per_node // stride))
        rate = constants.intra_fraction * self.cluster.device.intra_bytes_per_s
        if inner < ranks:
            sharing = min(stride, per_node) if axis == "pp" else per_node / inner
            rate = min(rate, constants.node_fraction * self.cluster.network_bytes_per_s / sharing)
        return Link(constants.alpha_s, 1 / rate)

    def step(self, work: Workload) -> TimeBreakdown:
        """The time of one step by part."""
        device, constants, mesh = self.cluster.device, self.constants, work.mesh
        flops_per_s = constants.matmul_fraction * device.matmul_flops
        bytes_per_s = constants.memory_fraction * device.memory_bytes_per_s
        busy = work.flops / flops_per_s + work.traffic_bytes / bytes_per_s
        busy += work.fused_attention_flops / device.attention_flops
        queued = constants.launch_s * work.kernel_passes
        costs = [self._parts(one, mesh) for one in work.layer_collectives]
        compute = hypot(busy, queued)
        layer = hypot(busy + sum(cost[1] for cost in costs), queued + sum(cost[0] for cost in costs))
        head = work.head_flops / flops_per_s + work.head_bytes / bytes_per_s
        send = 2 * self._send(work, mesh) * work.virtual_stages
        gathers = [self._time(one, mesh) for one in work.pass_collectives]
        stage, last = work.layers * layer, work.last_layers * layer + head
        slot = max(stage, last)
        inside = _merged(sum(gathers), slot) if work.overlaps else sum(gathers)
        m = work.micro_steps
        bubble = (mesh.pp - 1) / work.virtual_stages * (stage + send)
        in_layers = ((m - 1) * (slot - last) + m * last) if mesh.pp > 1 else m * last
        share = 1 - compute / layer if layer else 0.0
        layers_s = in_layers - m * head
        rows = [*self._layer_rows(work, costs, m * work.layers, layers_s * share)]
        if send:
            sent = 2 * work.send_bytes * work.virtual_stages * m
            rows.append(CollectiveTime("send", "pp", sent, m * send, m * send))
        rows += _rows(work.pass_collectives, gathers, mesh, m, inside)
        reduced = [self._time(one, mesh) for one in work.step_collectives]
        exposed = _merged(sum(reduced), slot * 2 / 3) if work.overlaps else sum(reduced)
        rows += _rows(work.step_collectives, reduced, mesh, 1, exposed)
        optimizer = work.optimizer_bytes / (_OPTIMIZER_FRACTION * device.memory_bytes_per_s)
        offload = work.host_optimizer_bytes / _HOST_OPTIMIZER_BYTES_PER_S
        offload += work.host_link_bytes / device.host_link_bytes_per_s
        return TimeBreakdown(
            layers_s * (1 - share) + m * head, tuple(rows), bubble, optimizer, offload, constants.step_s
        )

    def _parts(self, one: Collective, mesh: Mesh) -> tuple[float, float]:
        """(latencies, transfers) of all operations of one entry."""
        link, (ranks, stride) = self.link(one.axis, mesh), mesh.group(one.axis)
        inner = max(1, self.cluster.per_node // stride)
        latency = one.count * link.alpha_s * steps(one.operation, ranks, inner)
        return latency, one.count * link.beta_s_per_byte * wire_bytes(one.operation, ranks, one.size_bytes)

    def _time(self, one: Collective, mesh: Mesh) -> float:
        latency, transfer = self._parts(one, mesh)
        return p_norm(latency, transfer, self.link(one.axis, mesh).knee)

    def _send(self, work: Workload, mesh: Mesh) -> float:
        return self.link("pp", mesh).seconds(1, work.send_bytes) if work.send_bytes else 0.0

    @staticmethod
    def _layer_rows(
        work: Workload, costs: Sequence[tuple[float, float]], passes: int, exposed: float
    ) -> list[CollectiveTime]:
        total = sum(map(sum, costs)) or 1.0
        return [
            CollectiveTime(
                one.operation,
                one.axis,
                passes * one.count * wire_bytes(one.operation, work.mesh.group(one.axis)[0], one.size_bytes),
                passes * sum(cost),
                exposed * sum(cost) / total,
            )
            for one, cost in zip(work.layer_collectives, costs, strict=True)
        ]


def _rows(
    operations: Sequence[Collective], times: Sequence[float], mesh: Mesh, passes: int, exposed: float
) -> list[CollectiveTime]:
    total = sum(times) or 1.0
    return [
        CollectiveTime(
            one.operation,
            one.axis,
            passes * one.count * wire_bytes(one.operation, mesh.group(one.axis)[0], one.size_bytes),
            passes * time,
            passes * exposed * time / total,
        )
        for one, time in zip(operations, times, strict=True)
    ]


def _merged(communication: float, work: float) -> float:
    """What communication adds to the work that runs concurrently."""
    return p_norm(communication, work, _OVERLAP_KNEE) - work


def fit_constants(
    cluster: Cluster, measured: Sequence[tuple[Workload, float]], priors: Sequence[Prior] = PRIORS
) -> Constants:
    """Constants from (workload, seconds per step) of real runs on `cluster`'s kind of nodes.

    Robust, in relative error, from the priors: see `least_squares`. A few steps suffice to move what they determine.
    """
    names = [one.name for one in fields(Constants)]

    def predict(values: Sequence[float]) -> list[float]:
        cost = CostModel(cluster, Constants(**dict(zip(names, values, strict=True))))
        return [cost.step(work).total_s for work, _ in measured]

    found = fit_relative(predict, [seconds for _, seconds in measured], priors)
    return Constants(**dict(zip(names, found, strict=True)))

"""What a run has measured about itself, for decisions about its size. Times are seconds.

`Measured` is what policies, the journal and later attempts at the run get; `Meter` counts it from the events of one
attempt. Both are values: the state machine keeps the meter in its state, so a replay measures the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from elastic.core.incident import Incident
from elastic.core.sharding.mesh_memory import HeldState, KnownMemory, MeshMemory

# Newest measurements of a kind: enough for a median, and old ones stop counting when the cluster changes.
_KEPT = 20
# World sizes whose step time is known.
_SIZES = 16
# Meshes of which a step time, or a lack of memory, is known.
_MESHES = 100
# Standard normal quantile of the limits of a 90 % interval.
_Z = 1.6449


Axes = Mapping[str, int]


@dataclass(frozen=True)
class TriedMesh:
    """A mesh that this run has trained on: its median step, or None where its memory did not suffice."""

    world_size: int
    axes: Axes
    step_s: float | None = None


@dataclass(frozen=True)
class Measured:
    """Newest measurements last.

    `recovery_s`: of unplanned incidents, from the symptom to the first step, without a wait for nodes between the two
    generations. `resize_s`: the same of planned ones. `replacement_s`: from the loss of a node until the workers of
    the next new slot were ready. `step_s`: the median step, by world size. `losses` of nodes without notice within
    `node_s` node-seconds. `meshes`: by sizes of the axes that may change, where any may; `memory`: of the same.
    `refused_tp`: sizes of that axis that the model cannot be cut by.
    """

    recovery_s: tuple[float, ...] = ()
    resize_s: tuple[float, ...] = ()
    replacement_s: tuple[float, ...] = ()
    step_s: Mapping[int, float] = field(default_factory=dict)
    losses: int = 0
    node_s: float = 0.0
    meshes: tuple[TriedMesh, ...] = ()
    memory: KnownMemory = field(default_factory=KnownMemory)
    refused_tp: tuple[int, ...] = ()

    @property
    def typical_resize_s(self) -> float | None:
        """A recovery stands in where no resize was measured: it does the same, and detects a failure besides."""
        known = self.resize_s or self.recovery_s
        return median(known) if known else None

    @property
    def typical_recovery_s(self) -> float | None:
        known = self.recovery_s or self.resize_s
        return median(known) if known else None

    @property
    def losses_per_node_s(self) -> float:
        """The mean of the posterior under Jeffreys' prior: above zero also before the first loss."""
        return (self.losses + 0.5) / self.node_s if self.node_s > 0 else 0.0

    @property
    def losses_per_node_s_interval(self) -> tuple[float, float]:
        """90 % interval of a Poisson rate (Garwood 1936); chi-squared quantiles by Wilson and Hilferty (1931)."""
        if self.node_s <= 0:
            return 0.0, math.inf
        low = _chi_squared(-_Z, 2 * self.losses) / 2 if self.losses else 0.0
        return low / self.node_s, _chi_squared(_Z, 2 * self.losses + 2) / 2 / self.node_s

    def speed(self, size: int, of: int) -> float:
        """Steps per second with `size` workers over those with `of`, at most 1. Linear where it was not measured."""
        if size in self.step_s and of in self.step_s:
            return min(1.0, self.step_s[of] / self.step_s[size])
        return min(1.0, size / of)


def _chi_squared(z: float, degrees: int) -> float:
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + z * math.sqrt(spread)) ** 3)


@dataclass(frozen=True)
class Meter:
    """`nodes` have been counted since `counted_at`. `missing`: when nodes were lost that no new slot has replaced yet;
    `arriving`: (slot, such a time) of placed slots whose workers are not ready. `begun_at`: the last generation's
    begin."""

    measured: Measured = field(default_factory=Measured)
    nodes: int = 0
    counted_at: float = 0.0
    missing: tuple[float, ...] = ()
    arriving: tuple[tuple[int, float], ...] = ()
    begun_at: float = 0.0

    def counted(self, nodes: int, now: float) -> Meter:
        """From now on the run has so many nodes."""
        node_s = self.measured.node_s + self.nodes * (now - self.counted_at)
        return replace(self, measured=replace(self.measured, node_s=node_s), nodes=nodes, counted_at=now)

    def lost(self, now: float) -> Meter:
        """A node was lost without notice."""
        measured = replace(self.measured, losses=self.measured.losses + 1)
        return replace(self, measured=measured, missing=(*self.missing, now))

    def placed(self, slot: int) -> Meter:
        """A new slot has a node: the replacement of the node that is missing for longest."""
        if not self.missing:
            return self
        return replace(self, missing=self.missing[1:], arriving=(*self.arriving, (slot, self.missing[0])))

    def without(self, slots: Collection[int]) -> Meter:
        """Of the arriving slots only those in `slots` are still there; what the others replaced is missing again."""
        gone = [since for slot, since in self.arriving if slot not in slots]
        if not gone:
            return self
        arriving = tuple(one for one in self.arriving if one[0] in slots)
        return replace(self, missing=tuple(sorted((*self.missing, *gone))), arriving=arriving)

    def ready(self, slot: int, now: float) -> Meter:
        """All workers of the slot are ready."""
        since = dict(self.arriving).get(slot)
        if since is None:
            return self
        arriving = tuple(one for one in self.arriving if one[0] != slot)
        known = _with(self.measured.replacement_s, now - since)
        return replace(self, measured=replace(self.measured, replacement_s=known), arriving=arriving)

    def recovered(self, incident: Incident, now: float) -> Meter:
        """The incident is over with the first step of the generation that began at `begun_at`."""
        times = incident.times
        seconds = times.get("decided", now) - times.get("symptom", now) + now - self.begun_at
        if incident.planned:
            measured = replace(self.measured, resize_s=_with(self.measured.resize_s, seconds))
        else:
            measured = replace(self.measured, recovery_s=_with(self.measured.recovery_s, seconds))
        return replace(self, measured=measured)

    def stepped(self, world_size: int, step_s: float) -> Meter:
        """The median step at this world size. One that takes no time is not believed."""
        if step_s <= 0:
            return self
        others = [(size, known) for size, known in self.measured.step_s.items() if size != world_size]
        known = dict([*others[1 - _SIZES :], (world_size, step_s)])
        return replace(self, measured=replace(self.measured, step_s=known))

    def tried(self, world_size: int, axes: Axes, step_s: float | None) -> Meter:
        """This mesh takes so long for a step, or ran out of memory (None)."""
        if not axes or (step_s is not None and step_s <= 0):
            return self
        others = [one for one in self.measured.meshes if (one.world_size, one.axes) != (world_size, axes)]
        known = (*others[1 - _MESHES :], TriedMesh(world_size, axes, step_s))
        return replace(self, measured=replace(self.measured, meshes=known))

    def refused(self, tp: int) -> Meter:
        """The model cannot be cut by so many workers."""
        known = tuple(sorted({*self.measured.refused_tp, tp}))
        return replace(self, measured=replace(self.measured, refused_tp=known))

    def remembered(self, world_size: int, axes: Axes, limit_bytes: int, rest_bytes: int, held: HeldState) -> Meter:
        """On this mesh a worker has `limit_bytes`, and at most `rest_bytes` were taken besides the state."""
        if not axes:
            return self
        known = self.measured.memory.measured(MeshMemory(world_size, axes, rest_bytes), limit_bytes, held)
        return replace(self, measured=replace(self.measured, memory=known))


def _with(known: tuple[float, ...], seconds: float) -> tuple[float, ...]:
    return (*known[1 - _KEPT :], round(seconds, 4))


class StepTimes:
    """Medians of steps on their way to the state machine: `add` returns one when it is news."""

    # Steps of a window: the first one soon, so that a short run knows its step time too.
    _FIRST, _LATER = 5, 50
    _NEWS = 0.1

    def __init__(self) -> None:
        self._generation = -1
        self._window: list[float] = []
        self._wanted = self._FIRST

    def add(self, generation: int, step_s: float, known_s: float | None) -> float | None:
        """A step that is not the first of its generation, and what is known of its world size; a median that differs
        from that by more than 10 %, or None."""
        if generation != self._generation:
            self._generation, self._window, self._wanted = generation, [], self._FIRST
        self._window.append(step_s)
        if len(self._window) < self._wanted:
            return None
        found, self._window, self._wanted = median(self._window), [], self._LATER
        return found if known_s is None or abs(found / known_s - 1) > self._NEWS else None

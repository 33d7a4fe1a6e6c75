"""Simulated nodes, worker processes and process groups: the true state, of which the controller knows a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic.core import events as ev
from elastic.core.data.steps import Range
from simulation.samples import Samples

if TYPE_CHECKING:
    from simulation.world import World


class Node:
    """`lemon`: worker processes cannot be started here. `frozen`: all its processes are stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.lemon = False
        self.slot: int | None = None
        # The deadline of its drain; 0: without a deadline.
        self.draining: float | None = None


class Process:
    """A worker process. `hung`: its training thread is stuck for good, its other threads answer. `stubborn`: it never
    leaves a generation when told to."""

    def __init__(self, world: World, worker: int, slot: int, node: Node) -> None:
        self.world, self.worker, self.slot, self.node = world, worker, slot, node
        self.alive, self.stopped, self.hung, self.stubborn = True, False, False, False
        self.status = "starting"
        self.generation, self.ended = 0, 0
        self.group: Group | None = None
        self.promised: int | None = None
        self.stop_at: int | None = None
        self.durable = True
        self.sent_until = 0.0
        self.deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.said: dict[str, ev.Event] = {}
        self.told: list[ev.Event] = []

    @property
    def frozen(self) -> bool:
        return self.stopped or self.node.frozen

    @property
    def inside(self) -> bool:
        return self.alive and self.status in ("joining", "joined", "training", "raised")

    def act(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Call after `delay`, unless the process has died by then; a frozen process calls when it thaws."""
        self.world.clock.after(delay, self._now, call, args)

    def _now(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.deferred.append((call, args))
        else:
            call(*args)

    def thaw(self) -> None:
        deferred, self.deferred = self.deferred, []
        for call, args in deferred:
            self.act(self.world.rng.uniform(0.0, 0.05), call, *args)
        if self.group is not None:
            self.group.kick()

    def say(self, event: ev.Event) -> None:
        self.said[type(event).__name__] = event
        self.told.append(event)
        self.world.send(self, event)

    def repeat(self, *names: str) -> None:
        """The controller asked again: repeat the earlier answer."""
        for name in names:
            if name in self.said:
                self.world.send(self, self.said[name])

    # --- what the controller asks for ---

    def ready(self) -> None:
        if self.status == "starting":
            self.status = "ready"
        self.say(ev.WorkerReady(self.worker, 1000 + self.worker, self.node.name))

    def begin(self, group: Group) -> None:
        if group.number <= self.ended and not self.inside:
            self.say(ev.WorkerLeft(group.number, self.worker, group.start))
        elif group.number > self.generation:
            self.said = {}
            self.generation, self.group, self.status = group.number, group, "joining"
            self.promised, self.stop_at = (group.start if group.stops_at_start else None), None
            self.act(self.world.rng.uniform(0.05, 0.5), self._join, group)

    def end(self, generation: int) -> None:
        self.ended = max(self.ended, generation)
        if generation > self.generation and self.inside:
            # Inside an older generation: leaving that one counts for the newer one too.
            if not self.hung and not self.stubborn:
                self.act(self.world.rng.uniform(0.01, 0.8), self._leave, self.generation)
        elif generation != self.generation:
            self.say(ev.WorkerLeft(generation, self.worker, 0))
        elif not self.inside:
            self.say(ev.WorkerLeft(generation, self.worker, self.group.step if self.group else 0))
        elif not self.hung and not self.stubborn:
            self.act(self.world.rng.uniform(0.01, 0.8), self._leave, generation)

    def propose_stop(self, generation: int) -> None:
        if generation != self.generation or self.status != "training" or self.group is None:
            return
        if self.promised is None:
            self.promised = self.group.step + (self.world.rng.random() < 0.7 and self.group.step < self.group.last)
        memory = (
            self.world.plan.settings.snapshots.enabled and self.world.rng.random() > self.world.plan.memory_failures
        )
        self.say(ev.StopPromised(generation, self.worker, self.promised, memory))

    def commit_stop(self, generation: int, step: int, durable: bool) -> None:
        if generation != self.generation or self.group is None:
            return
        if self.status == "training":
            self.promised = self.stop_at = step
            self.durable = durable
            if step == self.group.step:
                self.world.stops_where_it_is(self.group, durable)
            self.group.kick()
        elif not self.inside:
            self.repeat("WorkerLeft", "WorkerCompleted")

    # --- what it does by itself ---

    def _join(self, group: Group) -> None:
        if self.status == "joining" and self.group is group:
            self.status = "joined"
            self.say(ev.GroupJoined(group.number, self.worker))
            group.joined()

    def restore(self, group: Group, parts: int = 0) -> None:
        if self.status != "joined" or self.group is not group or group.broken or self.hung:
            return
        plan = self.world.plan
        if parts > 0:
            self.say(ev.RestoreProgressed(group.number, self.worker, parts << 20))
        if group.base is not None and parts < plan.restore_parts:
            self.act(plan.part_s, self.restore, group, parts + 1)
            return
        if group.base is not None and not self.world.restorable(group.base):
            self.status = "raised"
            self.say(ev.RestoreFailed(group.number, self.worker, group.base, "content check failed"))
            return
        self.status = "training"
        self.say(ev.TrainingReached(group.number, self.worker, group.start, "storage"))
        group.trains()

    def finish_training(self, reached_end: bool) -> None:
        """The user's function returns, unless this rank has promised to wait at its last boundary."""
        group = self.group
        assert group is not None
        if self.status == "training" and self.promised is None and self.generation > self.ended:
            self.status = "completed"
            self.say(ev.WorkerCompleted(group.number, self.worker, group.step, reached_end))

    def stop_here(self) -> None:
        if self.status == "training":
            assert self.group is not None
            self.status = "left"
            self.say(ev.WorkerLeft(self.generation, self.worker, self.group.step))

    def _leave(self, generation: int) -> None:
        if generation == self.generation and self.inside:
            assert self.group is not None
            self.status = "left"
            self.group.broken = True
            self.say(ev.WorkerLeft(max(generation, self.ended), self.worker, self.group.step))

    def notice_broken(self, group: Group) -> None:
        if self.group is group and self.status in ("joined", "training") and not self.hung:
            self.say(ev.CollectiveFailed(group.number, self.worker, group.step, "connection closed by peer"))

    def find_anomaly(self, event: ev.AnomalyFound | ev.AuditFailed) -> None:
        """Report the anomaly and leave the generation."""
        if self.generation == event.generation and self.status == "training":
            self.say(event)
            self.act(self.world.rng.uniform(0.01, 0.8), self._leave, self.generation)

    def die(self) -> None:
        self.alive = False
        self.deferred = []
        if self.group is not None:
            self.group.lost(self)


class Group:
    """The true state of a generation: its members move in lock-step, or none moves."""

    def __init__(
        self, world: World, number: int, members: list[Process], base: str | None, start: int, skips: tuple[Range, ...]
    ) -> None:
        self.world, self.number, self.members, self.base, self.start = world, number, members, base, start
        self.step, self.last, self.broken, self.moving = start, world.max_steps, False, False
        self.samples = (world.saved[base] if base is not None else Samples()).begin(skips)
        self.glitch = self.miscomputes = self.stops_at_start = False
        # Steps that were saved because the generation was planned to end there.
        self.kept: set[int] = set()
        self.progress_at = world.clock.now

    def joined(self) -> None:
        if self.world.is_cut(self.members):
            self.cannot_talk()
        if not self.broken and all(m.status == "joined" and m.alive for m in self.members):
            for member in self.members:
                member.act(self.world.rng.uniform(0.05, 0.6), member.restore, self)

    def cannot_talk(self) -> None:
        """Every member that waits for an answer gives up after a while."""
        if not self.broken:
            self.broken = True
            for member in self.members:
                member.act(self.world.rng.uniform(0.5, 3.0), member.notice_broken, self)

    def trains(self) -> None:
        if all(m.status == "training" for m in self.members):
            self.progress_at = self.world.clock.now
            if self.stops_at_start:
                return
            if self.step >= self.last:
                self.world.begun_at_the_end(self)
                self._all(lambda member: member.finish_training(self.world.reaches_end))
            else:
                self.kick()

    def kick(self) -> None:
        """Try to continue: an obstacle may be gone."""
        for member in self.members:
            if member.group is self and member.stop_at == self.step:
                member.act(0.01, member.stop_here)
        if not self.moving and not self.broken and self.step < self.last:
            self.moving = True
            self.world.clock.after(self.world.step_of(self) * self.world.rng.uniform(0.9, 1.1), self._step_ends)

    def _able(self, member: Process) -> bool:
        here = member.group is self and member.status == "training"
        free = member.promised is None or member.promised > self.step
        return here and free and member.alive and not (member.frozen or member.hung)

    def _step_ends(self) -> None:
        self.moving = False
        if self.broken or not all(self._able(member) for member in self.members):
            return
        raising = self.world.raises(self.step + 1, self.members)
        if raising is not None:
            self._raise(raising)
            return
        positions, bad = self.samples.of_step(self.step), self.glitch
        self.glitch = False
        if self.miscomputes:
            self._fail_audit()
            return
        if bad or self.world.is_bad(positions):
            policy = self.world.plan.settings.anomalies.policy
            self.world.seen(f"anomaly, policy {policy}")
            if policy != "skip":
                self._found(positions)
                return
            self.samples = self.samples.pass_over(positions)
            self.world.step_skipped(self, positions)
        else:
            self.samples = self.samples.consume(positions)
        self.step += 1
        self.progress_at = self.world.clock.now
        self.world.step_ended(self)
        if self.step >= self.last:
            self._all(lambda member: member.finish_training(self.world.reaches_end))
        self.kick()

    def _found(self, positions: Range) -> None:
        """Every member detects the anomaly on its own."""
        self.broken = True
        for rank, member in enumerate(self.members):
            kind = "loss" if rank == 0 else "gradient"
            event = ev.AnomalyFound(self.number, member.worker, self.step, kind, "nan", (positions,))
            member.act(self.world.rng.uniform(0.0, 0.3), member.find_anomaly, event)

    def _fail_audit(self) -> None:
        """One member computes wrong numbers, or two contradict each other: all members learn it together."""
        self.world.seen("audit failed")
        self.broken = True
        decided = self.world.rng.random() < 0.8
        suspects = sorted(self.world.rng.sample(range(len(self.members)), min(len(self.members), 2 - decided)))
        # What was saved of the step before may have the fault, too.
        sound = self.step - 1 if self.world.rng.random() < 0.5 else None
        for member in self.members:
            found = (tuple(suspects), decided, "they differ", None, sound)
            event = ev.AuditFailed(self.number, member.worker, self.step, *found)
            member.act(self.world.rng.uniform(0.0, 0.3), member.find_anomaly, event)

    def _raise(self, member: Process) -> None:
        self.broken, member.status = True, "raised"
        member.act(self.world.rng.uniform(0, 0.5), member.say, self.world.user_error(self.number, member, self.step))
        for other in self.members:
            if other is not member and self.world.rng.random() < 0.5:
                other.act(self.world.rng.uniform(0, 0.5), other.notice_broken, self)

    def lost(self, lost: Process) -> None:
        if self.broken or lost.generation != self.number:
            return
        self.broken = True
        for member in self.members:
            if member.inside and self.world.rng.random() < 0.8:
                member.act(self.world.rng.uniform(0.02, 0.5), member.notice_broken, self)

    def _all(self, call: Callable[[Process], None]) -> None:
        for member in self.members:
            member.act(self.world.rng.uniform(0.01, 0.4), call, member)

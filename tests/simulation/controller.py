"""The simulated controller: journal, state machine and executor, as in the real one, without actors."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.run import machine
from elastic.core.run.phase import Finished
from elastic.core.run.state import RunState
from elastic.core.settings import RunSettings
from elastic.core.typed_json import decode, encode
from simulation.invariants import Invariants
from simulation.processes import Group

if TYPE_CHECKING:
    from simulation.world import World


class Controller:
    def __init__(self, world: World, settings: RunSettings) -> None:
        self.world, self.settings = world, settings
        self.began = world.clock.now
        self.state: RunState = machine.initial(settings, self.began)
        self.journal: list[tuple[ev.Event, float]] = []
        self.history: list[act.Action] = []
        self.invariants = Invariants(world)
        self.up, self.incarnation, self.finished = True, 1, False
        self.waiting: list[ev.Event] = []
        self.tick_at: float | None = None
        self.crash_after: int | None = None
        # The controller crashes after it has accepted the next message and before it journals it.
        self.loses_next = False
        # Storage accepts no journal lines: they wait in memory, and a crash loses them.
        self.journal_away = False
        self.unwritten: list[tuple[ev.Event, float]] = []
        self.lost: list[ev.Event] = []
        self.forgot = False
        self.groups: dict[int, Group] = {}

    # --- events ---

    def deliver(self, event: ev.Event) -> None:
        if self.up:
            self.handle(event)
        else:
            self.waiting.append(event)

    def handle(self, event: ev.Event) -> None:
        """Journal, decide, act. A crash may happen between any two of these."""
        if self.finished:
            return
        now, before = self.world.clock.now, self.state
        if self.loses_next:
            self.world.seen("a message that was taken and not written down")
            self.loses_next = False
            self._crash()
            self.lost.append(event)
            return
        (self.unwritten if self.journal_away else self.journal).append((event, now))
        self.state, actions = machine.step(before, event, now)
        self.history.extend(actions)
        self.invariants.check(before, event, now, self.state, actions)
        performed = actions
        if self.crash_after is not None:
            performed, self.crash_after = actions[: self.crash_after], None
            self._crash()
        for action in performed:
            self.perform(action)
        if self.up:
            self._plan_tick()
            if type(before.phase) is not type(self.state.phase):
                self.world.stage_entered(type(self.state.phase).__name__)

    def _plan_tick(self) -> None:
        deadline = machine.next_deadline(self.state)
        if deadline is not None and deadline != self.tick_at:
            self.world.clock.at(deadline, self._tick, deadline)
        self.tick_at = deadline

    def _tick(self, deadline: float) -> None:
        if self.up and deadline == self.tick_at:
            self.tick_at = None
            self.handle(ev.Tick())

    # --- restarts ---

    def crash(self, down_s: float, actions: int | None = None) -> None:
        """End the controller now, or in the middle of its next turn, after it has performed `actions` actions."""
        if not self.up or self.finished:
            return
        self.down_s = down_s
        if actions is not None:
            self.crash_after = actions
        else:
            self._crash()

    def _crash(self) -> None:
        self.up, self.tick_at = False, None
        self.lost, self.unwritten = [event for event, _ in self.unwritten], []
        self.world.seen(f"controller restart in {type(self.state.phase).__name__}")
        self.world.clock.after(self.down_s, self._restart)

    def journal_back(self) -> None:
        self.journal_away = False
        self.journal += self.unwritten
        self.unwritten = []

    def _restart(self) -> None:
        if self.journal_away:
            # A restart has to read and claim the journal.
            self.world.clock.after(0.5, self._restart)
            return
        if self.world.cluster.away_since is not None:
            # Ray's control store restarts actors.
            self.world.seen("a restart that waited for the control store")
            self.world.clock.after(0.5, self._restart)
            return
        replayed = machine.initial(self.settings, self.began)
        for event, now in self.journal:
            replayed, _ = machine.step(replayed, event, now)
        assert replayed == self.state or self.lost, "the journal does not lead to the state that the controller had"
        assert self._from_point() == replayed, "a replay point and what follows it do not lead to the same state"
        self.state, self.up = replayed, True
        self.incarnation += 1
        self.handle(self._found(self.world.reattach(self.state)))
        self.world.resend(self.state, self.lost)
        self.lost = []
        waiting, self.waiting = self.waiting, []
        for event in waiting:
            self.deliver(event)

    def _from_point(self) -> RunState:
        """The state by way of a replay point: the state after a random event, through JSON, and the events after it."""
        count = Random(f"point {len(self.journal)} {self.world.clock.now}").randrange(len(self.journal) + 1)
        before, state = self.journal[:count], machine.initial(self.settings, self.began)
        for event, now in before:
            state, _ = machine.step(state, event, now)
        state = decode(RunState, json.loads(json.dumps(encode(state))), settings=self.settings)
        for event, now in self.journal[count:]:
            state, _ = machine.step(state, event, now)
        return state

    def _found(self, restarted: ev.ControllerRestarted) -> ev.ControllerRestarted:
        """`restarted` as it is handled. If events were lost, the rules about numbers restart from the journal's end and
        from the generations that the remaining workers know."""
        restarted = replace(restarted, incarnation=self.incarnation)
        if self.lost:
            newest = max(self.state.generation, restarted.newest_generation)
            self.invariants.forget(self.state, newest)
            self.groups = {number: group for number, group in self.groups.items() if number <= newest}
            self.forgot = True
            if restarted.newest_generation > self.state.generation:
                self.world.seen("a generation that is in no journal")
        return restarted

    # --- actions ---

    def perform(self, action: act.Action) -> None:
        world, cluster = self.world, self.world.cluster
        match action:
            case act.RequestSlot():
                cluster.request(action.slot)
            case act.ReleaseSlot():
                cluster.release(action.slot)
            case act.StartWorker():
                cluster.start(action.worker, action.slot)
            case act.KillWorker():
                if action.worker in cluster.processes:
                    cluster.kill(cluster.processes[action.worker])
            case act.BeginGeneration():
                self._begin(action)
            case act.EndGeneration():
                for worker in action.workers:
                    world.ask(worker, "end", action.generation)
            case act.Probe():
                for worker in action.workers:
                    world.probe(worker)
            case act.QuerySnapshots():
                world.memory.survey(action.survey, action.nodes if action.reach else ())
            case act.ProposeStop():
                for worker in action.workers:
                    world.ask(worker, "propose_stop", action.generation)
            case act.CommitStop():
                for worker in action.workers:
                    world.ask(worker, "commit_stop", action.generation, action.step, action.durable)
            case act.MeasureNode():
                world.measure(action.node)
            case act.FinishRun():
                self.finished = True
                for slot in [*cluster.pending, *cluster.placed]:
                    cluster.release(slot)
            case _:
                pass

    def _begin(self, action: act.BeginGeneration) -> None:
        group = self.groups.get(action.generation)
        if group is None:
            members = [self.world.cluster.processes[worker] for worker in action.members]
            group = Group(self.world, action.generation, members, action.checkpoint, action.step, action.skips)
            group.stops_at_start = action.stops_at_start
            self.groups[action.generation] = group
            self.world.watch(group)
        for worker in action.members:
            self.world.ask(worker, "begin", group)

    @property
    def over(self) -> bool:
        return self.finished and isinstance(self.state.phase, Finished)

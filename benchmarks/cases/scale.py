"""The control plane at sizes that no test machine has: the real rules, loop and journal, simulated nodes, no Ray.

The sizes grow until one of them takes longer than a minute; what is larger is not measured, and says so.
"""

from __future__ import annotations

import json
import pickle
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.figures import Figure, Target, not_measured
from benchmarks.options import Options
from benchmarks.simulated_agents import SimulatedAgents
from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import Copies, Snapshot, copies_of, place_replicas, snapshot_id
from elastic.core.data.joined_reports import joined_by_step
from elastic.core.data.steps import StepReport
from elastic.core.event_groups import together
from elastic.core.run import machine
from elastic.core.run.phase import Pausing
from elastic.core.run.state import RunState, SlotPhase, WorkerPhase
from elastic.core.settings import RunSettings, ScalingSettings, SnapshotSettings
from elastic.core.typed_json import decode, encode
from elastic.observe import records
from elastic.observe.journal import JournalWriter
from elastic.runtime.controller.collector import collect_seldom
from elastic.runtime.controller.control_loop import ControlLoop
from elastic.runtime.controller.records import Records
from elastic.runtime.controller.replay import Replayed
from elastic.runtime.messages import Beat, Item, NodeReports, Post, QuietNodes
from elastic.runtime.node.uplink import joined_nodes

RANKS = 8
_SIZES = (30, 100, 300, 1_000, 3_000, 10_000)
_TURN = 1_000
# Beyond this the next size, three times as large, is not tried.
_ENOUGH_S = 60.0
_START, _LOSS, _READ = "start", "a lost node to BeginGeneration", "a replay point read"
_BEATS, _STEP, _MEMORY = "heartbeats of a second", "step reports of one step", "memory of the process"
_COMMANDS, _STOP = "commands of an end and a begin", "a planned end, to its last command"
_LEAVE, _SURVEY = "members that report having left", "a survey of the nodes' snapshots"
# What ten thousand nodes are held against: seconds of one core, and MB.
_TARGETS = {_START: 30.0, _LOSS: 1.0, _READ: 2.0, _BEATS: 0.3, _STEP: 0.3, _COMMANDS: 2.0, _MEMORY: 2000.0}


@dataclass
class Fleet:
    """A run of `nodes` simulated nodes with `RANKS` workers each, as its controller sees it."""

    nodes: int
    journal: JournalWriter
    now: float = 1000.0
    events: int = 0
    actions: list[act.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.nodes * RANKS
        scaling = ScalingSettings(RANKS, count, workers_per_slot=RANKS)
        self.state = machine.initial(RunSettings("run", scaling=scaling, snapshots=SnapshotSettings(True)), self.now)

    def happen(self, events: list[ev.Event]) -> None:
        """As the control loop does: a turn's events are written down, then each is decided on."""
        for first in range(0, len(events), _TURN):
            turn = [event for event, _ in together(events[first : first + _TURN])]
            self.now += 0.01
            self.journal.extend([records.event(e, self.now, self.events + n) for n, e in enumerate(turn, 1)])
            self.events += len(turn)
            for event in turn:
                self.state, actions = machine.step(self.state, event, self.now)
                self.actions += actions

    def start(self) -> None:
        """From nothing to the first step of all ranks."""
        self.happen([ev.RunStarted()])
        pending = [slot.id for slot in self.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
        self.happen([ev.SlotPlaced(slot, f"node-{slot:05d}") for slot in pending])
        starting = [w.id for w in self.state.fleet.workers.values() if w.phase is WorkerPhase.STARTING]
        self.happen([ev.WorkerReady(worker, worker, "host") for worker in starting])
        self.begin()

    def begin(self) -> None:
        generation, members, step = self.state.generation, self.state.members, self.state.start_step
        self.happen([ev.GroupJoined(generation, worker) for worker in members])
        self.happen([ev.TrainingReached(generation, worker, step) for worker in members])
        self.happen([ev.FirstStepDone(generation, step + 1)])

    def lose(self, copies: Copies) -> None:
        """A node is lost and its peers leave: to the moment when the next generation is sent. `copies` are what the
        others hold."""
        generation, slot = self.state.generation, next(iter(self.state.fleet.slots))
        self.actions.clear()
        self.happen([ev.SlotLost(slot, "the connection to its agent was closed")])
        self.happen([ev.WorkerLeft(generation, worker, 1) for worker in self.state.members_inside])
        if self.state.saved.survey is not None:
            found = ((snapshot_id(1, generation), 1),)
            self.happen(
                [ev.SnapshotsReported(self.state.saved.survey.number, found, (), (), copies.ranks, copies.nodes)]
            )
        if not any(isinstance(action, act.BeginGeneration) for action in self.actions):
            raise AssertionError(f"no generation begins after a lost node: {self.state.phase}")

    def copies(self) -> Copies:
        """What the nodes hold of a snapshot with one replica of each shard, when the first one is gone."""
        names = [f"node-{slot:05d}" for slot in self.state.fleet.slots]
        nodes = [node for node in names for _ in range(RANKS)]
        copies = tuple(
            tuple(node for node in (own, *replicas) if node != names[0])
            for own, replicas in zip(nodes, place_replicas(nodes, 1), strict=True)
        )
        return copies_of(Snapshot(1, 1, copies))


def measure(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    sizes = _SIZES[:1] if options.quick else _SIZES
    for nodes in sizes:
        took_s = 0.0
        for name, unit, value in _measured(nodes, JournalWriter(str(options.folder), f"run-{nodes}")):
            took_s += value if unit == "s" else 0.0
            figures.append(_figure(nodes, name, unit, (value,)))
        if took_s > _ENOUGH_S or options.over:
            larger = [size for size in sizes if size > nodes]
            reason = f"{nodes:,} nodes took {took_s:.0f} s of one core"
            figures += [not_measured("scale", _name(size, "start"), "s", reason) for size in larger]
            break
    return figures


def _measured(nodes: int, journal: JournalWriter) -> Iterator[tuple[str, str, float]]:
    collect_seldom()
    fleet = Fleet(nodes, journal)
    yield _START, "s", _seconds(fleet.start)
    copies = fleet.copies()
    yield _LOSS, "s", _seconds(lambda: fleet.lose(copies))
    agents = SimulatedAgents(fleet.state, next(a for a in fleet.actions if isinstance(a, act.BeginGeneration)))
    # The first time relays are given the others' handles.
    agents.end_and_begin()
    yield from _with_calls(_COMMANDS, agents, agents.end_and_begin)
    # Answers are made the first time.
    agents.survey()
    yield from _with_calls(_SURVEY, agents, agents.survey)
    agents.records()
    yield from _with_calls("questions for the records of a manifest", agents, agents.records)
    loop = _loop_of(fleet)
    yield "heartbeats of a second, each node by itself", "s", _seconds(lambda: _beats(loop, fleet))
    groups = _groups(fleet)
    # After its first beat a node is known.
    _quiet(loop, fleet, groups, 1)
    beats = round(1 / fleet.state.settings.failures.heartbeat_s)
    yield _BEATS, "s", _seconds(lambda: _quiet(loop, fleet, groups, beats))
    yield "step reports of one step, each rank by itself", "s", _seconds(lambda: _step(loop, fleet))
    for message in _joined(fleet, step=2):
        # After a change of the fleet its nodes are looked up once, which is not the steady state.
        loop.node_reports(pickle.loads(message), fleet.now)  # noqa: S301
    messages: list[bytes] = []
    joining_s = _seconds(lambda: messages.extend(_joined(fleet, step=3)))
    yield _STEP, "s", _seconds(lambda: _joined_step(loop, fleet, messages))
    yield "the agents' part of it, all together", "s", joining_s
    texts: list[str] = []
    yield "a replay point made", "s", _seconds(lambda: texts.append(json.dumps(encode(fleet.state))))
    read: list[RunState] = []
    settings = fleet.state.settings
    again_s = _seconds(lambda: read.append(decode(RunState, json.loads(texts[0]), settings=settings)))
    if read[0] != fleet.state:
        raise AssertionError("a replay point is not read as it was made")
    yield _READ, "s", again_s
    yield "a replay point", "MB", len(texts[0]) / 1e6
    fleet.begin()
    yield from _with_calls(_STOP, agents, lambda: _stop(fleet, agents))
    left = _left(fleet)
    yield _LEAVE, "s", _seconds(lambda: _take_left(fleet, left))
    yield f"{_LEAVE}: calls", "calls", len(left)
    # Of all sizes so far, and with the simulated nodes: they grow, so that it is the last one's.
    yield _MEMORY, "MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _with_calls(name: str, agents: SimulatedAgents, work: Callable[[], object]) -> Iterator[tuple[str, str, float]]:
    agents.calls = 0
    yield name, "s", _seconds(work)
    yield f"{name}: calls", "calls", agents.calls


def _stop(fleet: Fleet, agents: SimulatedAgents) -> None:
    """A planned end: all members are asked where they can stop, they promise it, and are told where to."""
    fleet.actions.clear()
    fleet.happen([ev.StopRequested("enough")])
    (propose,) = (action for action in fleet.actions if isinstance(action, act.ProposeStop))
    fleet.happen(agents.propose_stop(propose))
    (commit,) = (action for action in fleet.actions if isinstance(action, act.CommitStop))
    agents.commit_stop(commit)


def _left(fleet: Fleet) -> list[bytes]:
    """What relays send of the members of their nodes when these have left."""
    state, nodes = fleet.state, list(_by_node(fleet).values())
    each, phase = state.settings.failures.nodes_per_relay, state.phase
    step = phase.stop_at or 0 if isinstance(phase, Pausing) else 0

    def post(worker: int) -> Post:
        return Post(1, [Item("event", ev.to_json(ev.WorkerLeft(state.generation, worker, step)), number=9)])

    groups = [nodes[first : first + each] for first in range(0, len(nodes), each)]
    return [pickle.dumps({worker: post(worker) for node in group for worker in node}) for group in groups]


def _take_left(fleet: Fleet, messages: Sequence[bytes]) -> None:
    """To the next decision, answers included."""
    events: list[ev.Event] = []
    loop = _loop_of(fleet, events.append)
    for message in messages:
        pickle.dumps(loop.answer_all(pickle.loads(message), 1))  # noqa: S301
    fleet.happen(events)
    if fleet.state.members_inside:
        raise AssertionError("members have left and are inside")


def _loop_of(fleet: Fleet, emit: Callable[[ev.Event], None] = lambda event: None) -> ControlLoop:
    """The controller's loop next to the run's state as it is now."""
    settings, state = fleet.state.settings, fleet.state
    loop = ControlLoop(settings, Replayed(settings), Records(), emit, lambda: None)
    loop.state = state
    loop.telemetry.generation_begins(state.generation, state.world_size, state.start_step, fleet.now)
    return loop


def _beats(loop: ControlLoop, fleet: Fleet) -> None:
    """One second of heartbeats of all nodes, each as it comes, and of looks at who is silent."""
    by_node = _by_node(fleet)
    for _ in range(round(1 / fleet.state.settings.failures.heartbeat_s)):
        for node, workers in by_node.items():
            loop.heartbeats.beat(Beat(node, dict.fromkeys(workers, 0.0)), fleet.now)
        _looks(loop, fleet)


def _quiet(loop: ControlLoop, fleet: Fleet, groups: Sequence[bytes], times: int) -> None:
    """So many heartbeats of all nodes as relays pass them on. As they come over the network: reading them counts."""
    for _ in range(times):
        for message in groups:
            if loop.heartbeats.quiet(pickle.loads(message), fleet.now):  # noqa: S301
                raise AssertionError("a node of the run is said not to be part of it")
        _looks(loop, fleet)


def _looks(loop: ControlLoop, fleet: Fleet) -> None:
    """At who is silent, in the time of one heartbeat."""
    for _ in range(2):
        fleet.now += fleet.state.settings.failures.heartbeat_s / 2
        loop.heartbeats.look(fleet.now)


def _groups(fleet: Fleet) -> list[bytes]:
    """What relays send of the nodes that have them, where nobody is silent."""
    nodes = list(_by_node(fleet).items())
    each = fleet.state.settings.failures.nodes_per_relay
    found = [nodes[first : first + each] for first in range(0, len(nodes), each)]
    return [pickle.dumps(QuietNodes(*map(tuple, zip(*group, strict=True)))) for group in found]


def _by_node(fleet: Fleet) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for worker in fleet.state.members:
        node = fleet.state.fleet.node_of(worker) or ""
        found[node] = (*found.get(node, ()), worker)
    return found


def _step(loop: ControlLoop, fleet: Fleet) -> None:
    """Each rank reports the step in a message of its own, as the workers of nodes with one worker do."""
    for worker, report in _reports(fleet, step=1):
        loop.deliver(worker, [Item("step", report, number=1)], fleet.now)
    if loop.telemetry.step != fleet.state.start_step + 1:
        raise AssertionError("the step is not complete")


def _joined_step(loop: ControlLoop, fleet: Fleet, messages: Sequence[bytes]) -> None:
    """Relays report a step for the ranks of their nodes. As they come over the network: reading them counts."""
    for message in messages:
        if not loop.node_reports(pickle.loads(message), fleet.now):  # noqa: S301
            raise AssertionError("step reports of some nodes are not taken")
    if loop.telemetry.step != fleet.state.start_step + 3:
        raise AssertionError("the step is not complete")


def _joined(fleet: Fleet, step: int) -> Iterator[bytes]:
    """What agents make of their ranks' reports of a step, and relays of the agents'."""
    reports = dict(_reports(fleet, step))
    parts = []
    for node, workers in _by_node(fleet).items():
        steps = joined_by_step(reports[worker] for worker in workers)
        parts.append(NodeReports((node,), workers, 1, steps))
    each = fleet.state.settings.failures.nodes_per_relay
    for first in range(0, len(parts), each):
        yield pickle.dumps(joined_nodes(tuple(parts[first : first + each])))


def _reports(fleet: Fleet, step: int) -> Iterator[tuple[int, StepReport]]:
    """Workers with their reports of a step."""
    state = fleet.state
    for rank, worker in enumerate(state.members):
        yield worker, StepReport(
            state.start_step + step, 1e-5, ((rank, rank + 1),), 1, 1.0, generation=state.generation, rank=rank,
            metrics={"loss": 1.0}, noncollective_s=0.5,
        )  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    """Of one core: what others do on the machine does not count."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _figure(nodes: int, name: str, unit: str, values: tuple[float, ...]) -> Figure:
    targets = (Target("max", _TARGETS[name]),) if nodes == _SIZES[-1] and name in _TARGETS else ()
    return Figure("scale", _name(nodes, name), unit, values, targets=targets)


def _name(nodes: int, name: str) -> str:
    return f"{name}, {nodes:,} nodes of {RANKS} ranks"

"""Failure and hang detection: small tables of what was heard and when.

They have no clock (every method takes the time) and decide nothing: what they return are facts that
`machine.step` gets as events. Not journaled: a restarted controller starts with empty tables, which raise no suspicion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import median
from typing import NamedTuple

from elastic.core.events import ProgressStalled, WorkersSilent

# What `LastSeen.silent` returns is the event itself.
Silence = WorkersSilent


class _Beat(NamedTuple):
    """A node's newest heartbeat: when it came, the workers' ages then, and when the one longest silent was heard of.
    `quiet` are its workers where all their ages were 0."""

    at: float
    ages: Mapping[int, float]
    oldest: float
    quiet: tuple[int, ...] = ()

    def when(self, worker: int) -> float:
        age_s = self.ages.get(worker)
        return -inf if age_s is None else self.at - age_s


class LastSeen:
    """When each node's agent and each worker was last heard of.

    A worker beats to its node's agent, and the agent reports the ages of those beats. A worker is therefore silent on
    its own only by its agent's clock; when the agent itself is late, it is the node that is suspected, once, with
    all of its workers, whatever these say themselves: a node is of no use without its agent.

    The observer's own lateness is evidence against itself: after a pause of the caller everybody looks silent, because
    nothing was read. One heartbeat interval of grace follows, in which what was queued can be heard.

    Ten thousand nodes send 400,000 ages a second. A heartbeat is therefore kept as it comes, and its ages are looked at
    one by one only where one of them is large.
    """

    def __init__(self, heartbeat_s: float, alone_s: float = 0.0) -> None:
        """When all of several nodes fall silent together, no node is suspected for `alone_s`."""
        self._heartbeat_s = heartbeat_s
        self._alone_s = alone_s
        self._nodes: dict[str, float] = {}
        self._beats: dict[str, _Beat] = {}
        # Workers of which something else was heard, later than their nodes' beats have told, or that these do not name.
        self._others: dict[int, tuple[str, float]] = {}
        # No worker was heard of earlier than this; later ones are found when all are looked at.
        self._oldest = inf
        self._forgotten: set[int] = set()
        self._reported: dict[int, float] = {}
        # Nodes whose agents alone are silent, and when that was reported.
        self._agents: dict[str, float] = {}
        # Until when those were heard that were lost in such a silence.
        self._lost = -inf
        self._active: float | None = None
        self._woke, self._slept_s = 0.0, 0.0
        self._excused: float | None = None
        self._outage_s = self._patient_until = 0.0

    def heard_node(self, node: str, now: float, ages: Mapping[int, float] | None = None) -> None:
        """The agent of `node` has spoken; `ages` are the seconds since its workers' last beats, by its clock."""
        self._awake(now)
        self._excused = None
        self._nodes[node] = max(now, self._nodes.get(node, now))
        if self._agents:
            self._agents.pop(node, None)
        if ages:
            oldest, before = now - max(ages.values()), self._beats.get(node)
            # Every worker that the last beat has named was heard of since: it says nothing more.
            if before is not None and (oldest < before.at or ages.keys() != before.ages.keys()):
                for worker in before.ages:
                    if before.when(worker) > now - ages.get(worker, inf):
                        self._seen(worker, node, before.when(worker))
            self._beats[node] = _Beat(now, ages, oldest)
            self._oldest = min(self._oldest, oldest)

    def heard_quiet(self, nodes: Sequence[str], workers: Sequence[tuple[int, ...]], now: float) -> None:
        """As `heard_node` of each of the nodes, where none of its workers is late: `workers[i]` are those of
        `nodes[i]`. Of most nodes only the time is new, which costs a tenth."""
        self._awake(now)
        self._excused = None
        for node, quiet in zip(nodes, workers, strict=True):
            before = self._beats.get(node)
            known = before is not None and before.quiet == quiet != ()
            if known and not self._agents and self._nodes[node] <= now:
                self._nodes[node] = now
                self._beats[node] = _Beat(now, self._beats[node].ages, now, quiet)
            else:
                self.heard_node(node, now, dict.fromkeys(quiet, 0.0))
                if quiet:
                    self._beats[node] = self._beats[node]._replace(quiet=quiet)

    def heard_worker(self, worker: int, node: str, now: float) -> None:
        """The worker itself has spoken: a probe's answer, or any other message of its own."""
        self._awake(now)
        self._excused = None
        self._seen(worker, node, now)

    def expect(self, worker: int, node: str, by: float) -> None:
        """Count the worker and its node's agent as heard of at the time `by`, where they were not before.

        For workers that a restarted controller knows from its journal: if they died while nobody listened, no beat
        will ever come whose absence could be noticed. Until `by` they may still be finding their way to it, which is
        no silence of theirs.
        """
        self._nodes.setdefault(node, by)
        self._oldest = min(self._oldest, by)
        if self._when(worker, node) == -inf:
            self._seen(worker, node, by)

    def forget_worker(self, worker: int) -> None:
        """The worker was written off. Its number is never used again, so a late beat does not bring it back."""
        self._forgotten.add(worker)
        self._others.pop(worker, None)
        self._reported.pop(worker, None)

    def retain(self, workers: Iterable[int], nodes: Iterable[str]) -> None:
        """Forget all other workers and nodes: the state machine's lists are the ones that count.

        A lost, drained or evicted node is silent for ever. If it were kept, the last node left would count as one of
        several that are all silent, and would not be accused before `alone_s`. A node may come back with new workers.
        Where the last one was not heard of either since a lost one was, though, that is what it is.
        """
        known = self._others.keys() | chain.from_iterable(beat.ages for beat in self._beats.values())
        for worker in known - set(workers):
            self.forget_worker(worker)
        for node in self._nodes.keys() - set(nodes):
            heard = self._nodes.pop(node)
            if node in self._agents:
                self._lost = max(self._lost, heard)
            self._agents.pop(node, None)
            self._beats.pop(node, None)

    def silent(self, now: float, limit_s: float, *, agents: bool = True) -> Silence | None:
        """The workers that were not heard of for more than `limit_s`, with the nodes that are silent as a whole; with
        `agents` also the nodes whose agents are silent although their workers speak.

        Each is reported once, and again after another `limit_s` of silence. To be called a few times per `limit_s`.
        """
        self._awake(now)
        if self._grace(now, limit_s) or self._cut_off(now, limit_s):
            return None
        if now - self._oldest <= limit_s:
            # Nobody can be silent yet.
            return None
        late = self._late(now, limit_s)
        suspects = {worker for worker, node in late.items() if self._is_silent(worker, node, now, limit_s)}
        alone = self._without_agent(suspects, now, limit_s) if agents else {}
        due = sorted(w for w in suspects if w not in self._reported or now - self._reported[w] > limit_s)
        due += sorted(alone)
        if not due:
            return None
        self._reported.update((worker, now) for worker in due if worker in suspects)
        suspects |= alone.keys()
        nodes = sorted({alone.get(worker) or late[worker] for worker in due})
        self._agents.update((node, now) for node in nodes if self._node_silent(node, now, limit_s))
        of_nodes = self._workers_of(nodes)
        whole = tuple(
            node for node in nodes if suspects.issuperset(of_nodes[node]) and self._node_silent(node, now, limit_s)
        )
        heard = (self._nodes[alone[w]] if w in alone else self._when(w, late[w]) for w in due)
        return Silence(tuple(due), now - min(heard), whole)

    def alone(self, now: float, limit_s: float) -> bool:
        """Every one of several nodes has been silent for `limit_s`, and for less time than workers continue without a
        controller: it is the observer that is cut off, and what it does not hear is no evidence."""
        latest = max(self._nodes.values(), default=now)
        several = len(self._nodes) > 1 or latest <= self._lost + limit_s
        # Half of it: beats come at different times, and the first node to be overdue must not be accused by itself.
        return several and limit_s / 2 < now - latest <= self._alone_s

    def _cut_off(self, now: float, limit_s: float) -> bool:
        """Alone, or only just not any more: connections that were cut come back one after the other, the later the
        longer they were cut."""
        silent_s = now - max(self._nodes.values(), default=now)
        if self.alone(now, limit_s):
            self._outage_s = silent_s
            return True
        if self._outage_s > limit_s and silent_s <= limit_s / 2:
            self._patient_until = now + self._outage_s
        self._outage_s = 0.0
        return now < self._patient_until

    def _late(self, now: float, limit_s: float) -> dict[int, str]:
        """The workers that may be silent, with their nodes. All others were heard of within `limit_s`, or their nodes'
        beats are late and they are among those."""
        for worker, (node, when) in list(self._others.items()):
            if (beat := self._beats.get(node)) is not None and beat.when(worker) >= when:
                del self._others[worker]
        late = {worker: node for worker, (node, when) in self._others.items() if now - when > limit_s}
        for node, beat in self._beats.items():
            if now - beat.oldest > limit_s:
                late.update(dict.fromkeys(self._named(beat), node))
        for worker, node in late.items():
            # What was heard later than the last report ends that silence: the next one is reported at once.
            if self._when(worker, node) > self._reported.get(worker, inf):
                del self._reported[worker]
        heard = chain((when for _, when in self._others.values()), (beat.oldest for beat in self._beats.values()))
        self._oldest = min(chain(heard, self._nodes.values()), default=inf)
        return late

    def _workers_of(self, nodes: Collection[str]) -> dict[str, list[int]]:
        """The workers of these nodes."""
        found: dict[str, list[int]] = {node: [] for node in nodes}
        for node in nodes:
            if node in self._beats:
                found[node] += self._named(self._beats[node])
        for worker, (node, _) in self._others.items():
            if node in found:
                found[node].append(worker)
        return found

    def _named(self, beat: _Beat) -> list[int]:
        """The workers of which the beat tells the newest."""
        return [worker for worker in beat.ages if worker not in self._others and worker not in self._forgotten]

    def _when(self, worker: int, node: str) -> float:
        """When the worker was last heard of; -inf: not at all."""
        beat, (_, other) = self._beats.get(node), self._others.get(worker, (node, -inf))
        return other if beat is None else max(other, beat.when(worker))

    def _is_silent(self, worker: int, node: str, now: float, limit_s: float) -> bool:
        seen = self._when(worker, node)
        agent = self._nodes.get(node, seen)
        by_its_agent = agent - seen > limit_s
        with_its_agent = now - agent > limit_s
        return now - seen > limit_s and (by_its_agent or with_its_agent)

    def _without_agent(self, silent: Collection[int], now: float, limit_s: float) -> dict[int, str]:
        """The workers that speak and whose agents do not, with their nodes, where that is to be reported."""
        due = [
            node
            for node, heard in self._nodes.items()
            if now - heard > limit_s and now - self._agents.get(node, heard) > limit_s
        ]
        return {w: node for node, workers in self._workers_of(due).items() for w in workers if w not in silent}

    def _node_silent(self, node: str, now: float, limit_s: float) -> bool:
        return node in self._nodes and now - self._nodes[node] > limit_s

    def _seen(self, worker: int, node: str, when: float) -> None:
        if worker in self._forgotten:
            return
        before = self._others.get(worker)
        if before is None or when > before[1]:
            self._others[worker] = (node, when)
            self._oldest = min(self._oldest, when)

    def _awake(self, now: float) -> None:
        slept_s = now - self._active if self._active is not None else 0.0
        self._active = now
        if slept_s > self._heartbeat_s:
            self._woke, self._slept_s = now, slept_s

    def _grace(self, now: float, limit_s: float) -> bool:
        if self._slept_s <= limit_s / 2 or now >= self._woke + self._heartbeat_s:
            return False
        # Granted once until somebody is heard: a caller that is always late must still notice that all are gone.
        if self._excused is None:
            self._excused = self._woke
        return self._excused == self._woke


class HangLimit:
    """How long a step may take before it is a hang: max(floor, factor * median of the last 64 steps)."""

    def __init__(self, floor_s: float, factor: float, first_s: float = 0.0) -> None:
        """`first_s` is the least limit for a generation's first step: engine build and compilation are in it."""
        self._floor_s, self._factor, self._first_s = floor_s, factor, first_s
        self._durations_s: deque[float] = deque(maxlen=64)

    def add(self, duration_s: float) -> None:
        """One finished step. First steps of generations are not to be added: they measure something else."""
        self._durations_s.append(duration_s)

    def limit(self, first_step: bool = False) -> float:
        """Seconds. Before any step is known, the floor."""
        learned = self._factor * median(self._durations_s) if self._durations_s else 0.0
        return max(self._floor_s, learned, self._first_s if first_step else 0.0)


class ProgressWatch:
    """Notices that heartbeats continue and steps do not. Time counts only while the caller says that members train."""

    def __init__(self, limit: HangLimit) -> None:
        self._limit = limit
        self._generation = -1
        self._step = 0
        self._first = True
        self._since: float | None = None
        self._checked: float | None = None
        # The generation whose members have done all steps of the run: no further step is expected.
        self._over = -1

    def step_ended(self, generation: int, step: int, now: float) -> None:
        """Some member has finished optimizer step `step`. Older generations and steps seen before change nothing."""
        if generation < self._generation or (generation == self._generation and step <= self._step):
            return
        self._first = False
        self._generation, self._step, self._since = generation, step, now

    def moved(self, generation: int, now: float, *, over: bool = False) -> None:
        """A member's code makes progress although no step ended (an evaluation, say). `over`: all steps are done."""
        if generation == self._generation and self._since is not None:
            self._since = now
        if over:
            self._over = max(self._over, generation)

    def check(
        self, generation: int, step: int, now: float, training: bool, behind: Iterable[int] = ()
    ) -> ProgressStalled | None:
        """`step` is the generation's first; `behind` are members known to lag. Repeated after another limit's time."""
        paused_s = now - self._checked if self._checked is not None else 0.0
        self._checked = now
        if generation > self._generation:
            self._generation, self._step, self._first, self._since = generation, step, True, None
        limit_s = self._limit.limit(self._first)
        if not training or generation == self._over:
            self._since = None
        elif self._since is None or paused_s > limit_s / 2:
            # The observer slept: heartbeats that it did not read say nothing about their senders.
            self._since = now
        elif now - self._since > limit_s:
            stalled_s, self._since = now - self._since, now
            return ProgressStalled(generation, self._step, stalled_s, limit_s, tuple(sorted(behind)))
        return None

"""Failure and hang detection: small tables of what was heard and when.

They have no clock (every method takes the time) and decide nothing: what they return are facts that
`machine.step` gets as events. Not journaled: a restarted controller starts with empty tables, which raise no suspicion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from math import inf
from statistics import median

from elastic.core.events import ProgressStalled, WorkersSilent

# What `LastSeen.silent` returns is the event itself.
Silence = WorkersSilent


class LastSeen:
    """When each node's agent and each worker was last heard of.

    A worker beats to its node's agent, and the agent reports the ages of those beats. A worker is therefore silent on
    its own only by its agent's clock; when the agent itself is late, it is the node that is suspected, once, with
    all of its workers, whatever these say themselves: a node is of no use without its agent.

    The observer's own lateness is evidence against itself: after a pause of the caller everybody looks silent, because
    nothing was read. One heartbeat interval of grace follows, in which what was queued can be heard.
    """

    def __init__(self, heartbeat_s: float, alone_s: float = 0.0) -> None:
        """When all of several nodes fall silent together, no node is suspected for `alone_s`."""
        self._heartbeat_s = heartbeat_s
        self._alone_s = alone_s
        self._nodes: dict[str, float] = {}
        self._workers: dict[int, tuple[str, float]] = {}
        # No worker was heard of earlier than this; later ones are found when all are looked at.
        self._oldest = inf
        self._forgotten: set[int] = set()
        self._reported: dict[int, float] = {}
        # Nodes whose agents alone are silent, and when that was reported.
        self._agents: dict[str, float] = {}
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
        workers, reported = self._workers, self._reported
        for worker, age_s in (ages or {}).items():
            when, before = now - age_s, workers.get(worker)
            if before is not None and when > before[1] and worker not in reported:
                # The usual case of `_seen`, of which ten thousand nodes make 400,000 a second.
                workers[worker] = (node, when)
            else:
                self._seen(worker, node, when)

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
        if worker not in self._workers:
            self._seen(worker, node, by)

    def forget_worker(self, worker: int) -> None:
        """The worker was written off. Its number is never used again, so a late beat does not bring it back."""
        self._forgotten.add(worker)
        self._workers.pop(worker, None)
        self._reported.pop(worker, None)

    def retain(self, workers: Iterable[int], nodes: Iterable[str]) -> None:
        """Forget all other workers and nodes: the state machine's lists are the ones that count.

        A lost, drained or evicted node is silent for ever. If it were kept, the last node left would count as one of
        several that are all silent, and would not be accused before `alone_s`. A node may come back with new workers.
        """
        for worker in self._workers.keys() - set(workers):
            self.forget_worker(worker)
        for node in self._nodes.keys() - set(nodes):
            del self._nodes[node]
            self._agents.pop(node, None)

    def silent(self, now: float, limit_s: float, *, agents: bool = True) -> Silence | None:
        """The workers that were not heard of for more than `limit_s`, with the nodes that are silent as a whole; with
        `agents` also the nodes whose agents are silent although their workers speak.

        Each is reported once, and again after another `limit_s` of silence. To be called a few times per `limit_s`.
        """
        self._awake(now)
        if self._grace(now, limit_s) or self._cut_off(now, limit_s):
            return None
        if now - self._oldest <= limit_s:
            # Nobody can be silent yet: with 80,000 workers a look at each of them, ten times a second, fills a core.
            return None
        heard = chain((seen for _, seen in self._workers.values()), self._nodes.values())
        self._oldest = min(heard, default=inf)
        suspects = {worker for worker in self._workers if self._is_silent(worker, now, limit_s)}
        alone = self._without_agent(suspects, now, limit_s) if agents else set()
        due = sorted(w for w in suspects if w not in self._reported or now - self._reported[w] > limit_s)
        due += sorted(alone)
        if not due:
            return None
        self._reported.update((worker, now) for worker in due if worker in suspects)
        suspects |= alone
        nodes = sorted({self._workers[worker][0] for worker in due})
        self._agents.update((node, now) for node in nodes if self._node_silent(node, now, limit_s))
        speaking = {where for worker, (where, _) in self._workers.items() if worker not in suspects}
        whole = tuple(node for node in nodes if node not in speaking and self._node_silent(node, now, limit_s))
        longest = max(now - self._heard(worker, worker in alone) for worker in due)
        return Silence(tuple(due), longest, whole)

    def alone(self, now: float, limit_s: float) -> bool:
        """Every one of several nodes has been silent for `limit_s`, and for less time than workers continue without a
        controller: it is the observer that is cut off, and what it does not hear is no evidence."""
        latest = max(self._nodes.values(), default=now)
        # Half of it: beats come at different times, and the first node to be overdue must not be accused by itself.
        return len(self._nodes) > 1 and limit_s / 2 < now - latest <= self._alone_s

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

    def _is_silent(self, worker: int, now: float, limit_s: float) -> bool:
        node, seen = self._workers[worker]
        agent = self._nodes.get(node, seen)
        by_its_agent = agent - seen > limit_s
        with_its_agent = now - agent > limit_s
        return now - seen > limit_s and (by_its_agent or with_its_agent)

    def _without_agent(self, silent: set[int], now: float, limit_s: float) -> set[int]:
        """The workers that speak and whose agents do not, where that is to be reported."""
        due = {
            node
            for node, heard in self._nodes.items()
            if now - heard > limit_s and now - self._agents.get(node, heard) > limit_s
        }
        return {w for w, (node, _) in self._workers.items() if node in due and w not in silent} if due else set()

    def _heard(self, worker: int, by_its_agent: bool) -> float:
        node, seen = self._workers[worker]
        return self._nodes[node] if by_its_agent else seen

    def _node_silent(self, node: str, now: float, limit_s: float) -> bool:
        return node in self._nodes and now - self._nodes[node] > limit_s

    def _seen(self, worker: int, node: str, when: float) -> None:
        if worker in self._forgotten:
            return
        before = self._workers.get(worker)
        if before is None or when > before[1]:
            self._workers[worker] = (node, when)
            if when < self._oldest:
                self._oldest = when
            # A beat that is newer than the last report ends that silence: the next one is reported at once.
            if when > self._reported.get(worker, when):
                del self._reported[worker]

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

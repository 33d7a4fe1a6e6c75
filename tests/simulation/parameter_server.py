"""A parameter server whose servers and workers are lost, cut off and replaced at any moment, by a seed.

The rules are the real ones (`elastic/core/server`); simulated are messages, which arrive in any order or with one side
dead, and the shards, of which only the history is kept. Between two `yield`s nothing else happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from elastic.core.errors import IntegrityError
from elastic.core.server import global_batches as gb
from elastic.core.server.placement import Copy, Servers, View, first_view, installed, next_view, refused

Act = Generator[None, None, Any]


class Failed(Exception):
    """A request was refused, or one side of it is dead."""


@dataclass
class Held:
    """A server's copy of a shard."""

    copy: Copy = field(default_factory=Copy)
    version: int = 0
    pending: set[tuple[int, int]] = field(default_factory=set)
    history: list[gb.Batch] = field(default_factory=list)
    batches: gb.Batches | None = None
    busy: bool = False
    linked: bool = False


@dataclass
class Server:
    name: str
    view: View
    alive: bool = True
    shards: dict[int, Held] = field(default_factory=dict)

    def install(self, view: View) -> None:
        if not self.alive or view.number <= self.view.number:
            return
        for number, (servers, before) in enumerate(zip(view.shards, self.view.shards, strict=True)):
            held = self.shards.setdefault(number, Held())
            held.copy = installed(held.copy, self.name, servers)
            if held.copy.epoch is None:
                self.shards[number] = Held(busy=held.busy)
            elif servers != before:
                held.linked = False
        self.view = view


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        draw = self.chance.randint
        self.staleness, self.micros, self.total = draw(0, 3), draw(1, 4), draw(3, 8)
        self.view = first_view({f"s{at}": ("", at) for at in range(draw(2, 4))})
        self.servers = {name: Server(name, self.view) for name in self.view.addresses}
        begun = gb.begin(self.micros, self.staleness, self.total, cut_every=draw(0, 3))
        self.workers = tuple(f"w{at}" for at in range(draw(1, 5)))
        begun, _ = gb.step(begun, gb.Members(self.workers))
        for number, servers in enumerate(self.view.shards):
            lead = begun if number == 0 else None
            self.servers[servers.primary].shards[number] = Held(Copy(1), batches=lead)
            for name in self.servers:
                self.servers[name].shards.setdefault(number, Held())
        self.tasks: list[Act] = [self.members(), *(self.worker(name) for name in self.workers)]
        self.faults = draw(0, 6)
        self.acknowledged: set[gb.Part] = set()
        self.computed_from: dict[int, int] = {}  # lease number -> the oldest version of any shard it was computed from
        self.finished = False
        self.lost = False
        self.sometimes: set[str] = set()

    def run(self) -> None:
        for turn in range(60_000):
            if self.lost:
                self.sometimes.add("both copies of a shard were lost")
                return
            if self.finished and not self.tasks:
                break
            if turn % 40 == 39 and self.faults and not self.finished:
                self.faults -= 1
                self.fault()
            task = self.chance.choice(self.tasks)
            try:
                next(task)
            except StopIteration:
                self.tasks.remove(task)
            except Failed:
                raise AssertionError("a failure was not handled") from None
        else:
            raise AssertionError("the run never ends")
        self.check()

    # What the controller does.

    def fault(self) -> None:
        kind = self.chance.choice(
            ["server killed", "server cut off", "worker killed", "worker cut off", "link", "join"]
        )
        if kind.startswith("server") or kind == "join":
            if not self.in_step() and self.chance.random() < 0.8:
                return
            lost = []
            if kind != "join":
                lost = [self.chance.choice(list(self.view.addresses))]
                if len(self.view.addresses) == 1:
                    return
                # One that is cut off still serves who has not heard of the new view.
                self.servers[lost[0]].alive = kind == "server cut off"
            joined = {}
            if kind == "join" or self.chance.random() < 0.7:
                joined[self.joiner(lost)] = ("", len(self.servers))
            try:
                self.view = next_view(self.view, lost, joined)
            except IntegrityError:
                self.lost = True
                return
            for name in self.view.addresses:
                self.tasks.append(self.announce(name, self.view))
            self.sometimes.add(kind)
        elif kind == "link":
            held = self.chance.choice([held for server in self.servers.values() for held in server.shards.values()])
            held.linked = False
        else:
            self.lose_worker(kind)

    def joiner(self, lost: list[str]) -> str:
        """A new server, or one that was cut off, with what it held then."""
        away = [
            name for name, server in self.servers.items() if server.alive and name not in (*self.view.addresses, *lost)
        ]
        if away and self.chance.random() < 0.7:
            self.sometimes.add("a server came back")
            return self.chance.choice(away)
        name = f"s{len(self.servers)}"
        self.servers[name] = Server(name, self.view, shards={at: Held() for at in range(len(self.view.shards))})
        return name

    def lose_worker(self, kind: str) -> None:
        if not self.workers:
            return
        lost = self.chance.choice(self.workers)
        joiner = f"w{self.chance.getrandbits(40)}"
        self.workers = (*(name for name in self.workers if name != lost), joiner)
        if kind == "worker killed":
            self.tasks = [
                task for task in self.tasks if getattr(task, "gi_code", None) is None or not self.is_of(task, lost)
            ]
        self.sometimes.add(kind)

    def is_of(self, task: Act, worker: str) -> bool:
        frame: Any = task.gi_frame  # type: ignore[attr-defined]
        if frame is None or frame.f_locals.get("name") != worker:
            return False
        # A lock that it holds on a server is the server's: the request runs to its end there.
        return not any(held.busy for server in self.servers.values() for held in server.shards.values())

    def members(self) -> Act:
        """Tells the servers who lives, one change after another; a new worker begins when they have heard of it."""
        known = self.workers
        while not self.finished:
            wanted = self.workers
            if wanted != known:
                yield from self.retried(lambda wanted=wanted: self.event(gb.Members(wanted)))
                self.tasks += [self.worker(name) for name in wanted if name not in known]
                known = wanted
            yield

    def announce(self, name: str, view: View) -> Act:
        for _ in range(self.chance.randint(0, 30)):
            yield
        self.servers[name].install(view)
        if view is self.view and any(
            servers.primary == name and self.servers[name].shards[number].copy.epoch is None
            for number, servers in enumerate(view.shards)
        ):
            self.lost = True  # its replica was not in step yet: never continued from
        for number, servers in enumerate(self.servers[name].view.shards):
            if servers.primary == name:
                self.tasks.append(self.protect(name, number))

    def protect(self, name: str, number: int) -> Act:
        """A primary sends its state to a new replica although nobody asks for anything."""
        try:
            yield from self.done(
                self.servers[name], number, self.servers[name].view.shards[number].epoch, lambda _: None
            )
        except Failed:
            return

    def in_step(self) -> bool:
        return all(
            self.servers[name].alive and self.servers[name].shards[number].copy.epoch == servers.epoch
            for number, servers in enumerate(self.view.shards)
            for name in (servers.primary, servers.replica)
            if name is not None
        )

    # What a server does.

    def done(self, server: Server, number: int, epoch: int, act: Callable[[Held], Any]) -> Act:
        """`act` on both copies of a shard: on the replica first."""
        yield
        while server.shards[number].busy:
            yield
        self.admitted(server, number, epoch, "primary")
        held = server.shards[number]
        held.busy = True
        try:
            replica = server.view.shards[number].replica
            if replica is not None:
                yield from self.forward(server, self.servers[replica], number, epoch, act)
            yield
            self.admitted(server, number, epoch, "primary")
            answer = act(held)
            if self.chance.random() < 0.01:
                self.sometimes.add("an answer lost")
                raise Failed
            return answer
        finally:
            server.shards[number].busy = held.busy = False

    def forward(self, server: Server, other: Server, number: int, epoch: int, act: Callable[[Held], Any]) -> Act:
        held = server.shards[number]
        linked, held.linked = held.linked, False
        if not linked:
            yield
            servers = other.view.shards[number]
            if not other.alive or servers.epoch != epoch or servers.replica != other.name or not server.alive:
                raise Failed
            other.shards[number] = deepcopy(held)
            other.shards[number].copy, other.shards[number].busy = Copy(epoch), False
            self.sometimes.add("state sent")
        yield
        self.admitted(other, number, epoch, "replica")
        act(other.shards[number])
        yield
        if self.chance.random() < 0.01:
            self.sometimes.add("answer of a replica lost")
            raise Failed
        held.linked = True

    def admitted(self, server: Server, number: int, epoch: int, role: Any) -> None:
        servers: Servers = server.view.shards[number]
        if not server.alive or refused(server.shards[number].copy, server.name, servers, epoch, role) is not None:
            raise Failed

    # What a worker does.

    def event(self, event: gb.Event) -> Act:
        def act(held: Held) -> gb.Answer:
            assert held.batches is not None
            held.batches, answer = gb.step(held.batches, event)
            return answer

        view = self.view
        answer = yield from self.done(self.servers[view.shards[0].primary], 0, view.shards[0].epoch, act)
        return answer

    def worker(self, name: str) -> Act:
        seen = 0
        while True:
            try:
                answer = yield from self.event(gb.Asked(name, seen))
                match answer:
                    case gb.Given():
                        seen = yield from self.compute(name, answer)
                    case gb.Finished():
                        yield from self.pull(answer.version, answer.batches)
                        self.finished = True
                        return
                    case gb.Unknown():
                        self.sometimes.add("an old worker was refused")
                        assert name not in self.workers, answer.why
                        return
            except Failed:
                self.sometimes.add("a request was made again")
            yield

    def compute(self, name: str, given: gb.Given) -> Act:
        again = False
        while True:
            lease = given.lease
            versions = yield from self.pull(lease.version, given.batches)
            assert min(versions) >= lease.version
            self.computed_from[lease.number] = min(versions)
            for number in range(len(self.view.shards)):
                yield from self.retried(lambda number=number, lease=lease: self.push(number, lease))
            answer = yield from self.retried(lambda lease=lease: self.event(gb.Pushed(name, lease.number)))
            if isinstance(answer, gb.Counted):
                self.acknowledged.add(gb.Part(lease.micro, lease.number))
            if isinstance(answer, gb.Unknown):
                assert name not in self.workers, answer.why
            if not isinstance(answer, gb.Given):
                return min(versions)
            self.sometimes.add("a gradient was too old")
            assert not again, "a gradient was too old twice"
            given, again = answer, True

    def retried(self, ask: Callable[[], Act]) -> Act:
        while True:
            try:
                answer = yield from ask()
                return answer
            except Failed:
                yield

    def push(self, number: int, lease: gb.Lease) -> Act:
        def act(held: Held) -> None:
            if all(part.micro != lease.micro for batch in held.history for part in batch):
                held.pending.add((lease.micro, lease.number))

        view = self.view
        servers = view.shards[number]
        yield from self.done(self.servers[servers.primary], number, servers.epoch, act)

    def pull(self, version: int, batches: Any) -> Act:
        versions = []
        for number in range(len(self.view.shards)):
            versions.append((yield from self.retried(lambda number=number: self.pulled(number, version, batches))))
        return versions

    def pulled(self, number: int, version: int, batches: Any) -> Act:
        def act(held: Held) -> int:
            for at in range(held.version, version):
                parts = batches[at]
                assert {(part.micro, part.number) for part in parts} <= held.pending, "a gradient that counted is lost"
                micros = {part.micro for part in parts}
                held.pending = {(micro, number) for micro, number in held.pending if micro not in micros}
                held.history.append(parts)
                held.version += 1
            return held.version

        servers = self.view.shards[number]
        found = yield from self.done(self.servers[servers.primary], number, servers.epoch, act)
        return found

    # What must hold.

    def check(self) -> None:
        histories = [
            self.servers[name].shards[number].history
            for number, servers in enumerate(self.view.shards)
            for name in (servers.primary, servers.replica)
            if name is not None and self.servers[name].shards[number].copy.epoch == servers.epoch
        ]
        longest = max(histories, key=len)
        assert all(history == longest[: len(history)] for history in histories), "shards do not agree"
        assert len(longest) == self.total
        parts = [part for batch in longest for part in batch]
        assert sorted(part.micro for part in parts) == list(range(self.total * self.micros)), "a sample counts not once"
        assert self.acknowledged <= set(parts), "an acknowledged gradient is lost"
        for version, batch in enumerate(longest):
            oldest = min(self.computed_from[part.number] for part in batch)
            assert version - oldest <= self.staleness, "a gradient is older than permitted"
            if version > oldest:
                self.sometimes.add("a gradient was stale")
            if not self.staleness:
                own = list(range(version * self.micros, (version + 1) * self.micros))
                assert [part.micro for part in batch] == own, "with staleness 0 the samples are those of the step"

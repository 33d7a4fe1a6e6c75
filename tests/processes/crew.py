"""Real processes for tests of one generation and of the next: started once, given generations, killed if need be.

The test is the controller: it tells ranks, world size and checkpoint, sees every event, and ends generations.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forks

# For another's outcome, which a failure explains.
_WHY_S = 5.0
_WAIT_S = 120.0
# On which a member shows its stacks.
_SHOW = signal.SIGUSR1


@dataclass
class Outcome:
    """What one rank tells after a generation."""

    result: Any
    clean: bool
    reports: list[Any]
    restores: list[Any]
    indices: list[int]
    told: dict[str, Any]
    threads: int
    descriptors: int
    resident_bytes: int
    # TCP sockets that the process still has, but for those of the rendezvous, and of attempts to connect (to that of a
    # generation that was ended meanwhile), which end by themselves.
    sockets: list[Any]


@dataclass
class Member:
    number: int
    process: Any
    pipe: Connection
    outcome: Outcome | None = None
    points: list[str] = field(default_factory=list)
    # Of the last generation; None before the first.
    in_loop: bool | None = None

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Crew:
    """`size` processes, each able to be any rank of any generation, one after another.

    `prepare` names a function that each calls before anything of the product is imported; such processes are no forks.
    """

    def __init__(self, size: int, prepare: str = "") -> None:
        self._prepare = prepare
        self._forks = multiprocessing.get_context("spawn") if prepare else forks.context()
        # The newest one's number.
        self.generation = 0
        self.members = [self._start(number) for number in range(size)]

    def _start(self, number: int) -> Member:
        ours, theirs = self._forks.Pipe()
        process = self._forks.Process(target=_live, args=(theirs, self._prepare))  # not a daemon: may have data workers
        process.start()
        theirs.close()
        return Member(number, process, ours)

    def replace(self, number: int) -> None:
        """A fresh process in the place of one that was killed."""
        self.members[number].process.kill()
        self.members[number].process.join()
        self.members[number] = self._start(number)

    def settle(self) -> None:
        """Members that may still be inside a test's function, where the next test's generation would find them, are
        replaced: those without an outcome, and survivors that stay in their loop. Fails where another one has kept a
        socket of a group after its last generation: a later test's data workers would inherit it."""
        # Not at the top: `prepare` comes before anything of the product.
        from elastic.training.result import SURVIVED

        leaks = []
        for member in self.members:
            # Of members that a test has not begun another one might look at those.
            member.points.clear()
            outcome = member.outcome
            stays = member.in_loop and outcome is not None and outcome.result.kind in SURVIVED
            leaked = outcome is not None and not stays and bool(outcome.sockets)
            if leaked:
                leaks.append(f"member {member.number}, {outcome.result.kind}: {outcome.sockets}")
            if stays or leaked or (member.in_loop is not None and outcome is None):
                self.replace(member.number)
        if leaks:
            raise AssertionError(f"sockets of an ended generation are still open: {leaks}")

    def begin(
        self, who: Sequence[int], fn: str, config: Mapping[str, Any], end_at: int | None = None, **spec: Any
    ) -> None:
        """Start the next generation: who[r] is rank r. `spec` are fields of GenerationSpec."""
        self.generation += 1
        first = self.members[who[0]]
        first.pipe.send(("host", None))
        rendezvous = self._expect(first, "hosted")
        for rank, number in enumerate(who):
            member = self.members[number]
            member.outcome, member.in_loop = None, bool(config.get("in_loop"))
            member.points.clear()
            fields = {"run_id": "run", "generation": self.generation, "rank": rank, "world_size": len(who), **spec}
            member.pipe.send(("run", (fn, dict(config), fields, rendezvous, end_at)))

    def outcome(self, number: int) -> Outcome:
        """Wait for a member's outcome."""
        member = self.members[number]
        while member.outcome is None:
            self._receive(member, "outcome")
        return member.outcome

    def run(self, who: Sequence[int], fn: str, config: Mapping[str, Any], **more: Any) -> list[Outcome]:
        self.begin(who, fn, config, **more)
        return [self.outcome(number) for number in who]

    def abort(self, number: int, reason: str) -> None:
        self.members[number].pipe.send(("abort", reason))

    def lose(self, number: int, survivors: Sequence[int]) -> list[Outcome]:
        """Kill a member, and tell the others. Returns what they came to."""
        self.members[number].signal(signal.SIGKILL)
        self.members[number].process.join()
        # Not every survivor is the dead rank's neighbour in the ring: whoever is still blocked is released.
        for other in survivors:
            self.abort(other, f"rank {number} was lost")
        ended = [self.outcome(other) for other in survivors]
        assert {outcome.result.kind for outcome in ended} <= {"ended", "collective_failed"}
        return ended

    def reached(self, number: int, point: str) -> None:
        """Wait until the member's training code came to a point."""
        member = self.members[number]
        while point not in member.points:
            if member.outcome is not None:
                raise AssertionError(f"member {number} ended before it came to {point}{self._whys()}")
            self._receive(member, "point")

    def in_collective(self, number: int) -> None:
        """Wait until the member's training thread is inside a collective, or waits for a parameter server, and stays
        there."""
        member = self.members[number]
        seen = 0
        while seen < 5:
            member.pipe.send(("where", None))
            seen = seen + 1 if self._expect(member, "where") else 0

    def close(self) -> None:
        for member in self.members:
            member.process.kill()
            member.process.join()

    def _expect(self, member: Member, kind: str) -> Any:
        while True:
            got, value = self._receive(member, kind)
            if got == kind:
                return value

    def _receive(self, member: Member, awaited: str) -> tuple[str, Any]:
        if not member.pipe.poll(_WAIT_S):
            self._show_stacks()
            raise TimeoutError(f"member {member.number} sent no {awaited}; see the stacks of all on stderr")
        got, value = member.pipe.recv()
        if got == "point":
            member.points.append(value)
        elif got == "outcome":
            member.outcome = value
        elif got == "broken":
            raise RuntimeError(value)
        return got, value

    def _whys(self) -> str:
        """How generations ended for those that have told it: one's failure makes the others'."""
        told = []
        for member in self.members:
            while member.outcome is None and member.in_loop is not None and member.pipe.poll(_WHY_S):
                self._receive(member, "outcome")
            if member.outcome is not None:
                told.append(f"\nmember {member.number}: {member.outcome.result}")
        return "".join(told)

    def _show_stacks(self) -> None:
        """Each member writes where its threads stand."""
        for member in self.members:
            member.signal(_SHOW)
            # For as long as that takes; none of them ends by it.
            member.process.join(1.0)


# -- in the member's process -------------------------------------------------------------------------------------

_pipe: Connection
_pipe_lock = threading.Lock()
# What the training code tells the test, and the dataset indices that it was given.
told: dict[str, Any] = {}
indices: list[int] = []


def tell(kind: str, value: Any) -> None:
    with _pipe_lock:
        _pipe.send((kind, value))


def point(name: str) -> None:
    """Called by training code: the test may wait for it."""
    tell("point", name)


def stay() -> None:
    """Called by training code that the test will kill or stop: never returns."""
    threading.Event().wait()


def _live(pipe: Connection, prepare: str) -> None:
    faulthandler.register(_SHOW)
    global _pipe
    _pipe = pipe
    if prepare:
        _named(prepare)()
    # Ctrl-C of the test run ends the members through their pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    # Data workers are to be forked, as they are in a process that was not spawned itself.
    multiprocessing.set_start_method("fork", force=True)
    from elastic.comm.rendezvous import host_store
    from elastic.engines.deepspeed.kind import KIND
    from elastic.training.cleanup import warm_up

    warm_up(KIND)
    training = Training()
    while True:
        try:
            command, value = pipe.recv()
        except EOFError:
            return
        if command == "host":
            tell("hosted", host_store("127.0.0.1"))
        elif command == "run":
            training.begin(value)
        elif command == "abort":
            training.runner.abort(value)
        elif command == "where":
            frame = sys._current_frames().get(training.thread.ident or 0)
            files = []
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            waits = ("torch/distributed/", "elastic/comm/server/", "elastic/comm/peer_addresses")
            tell("where", any(place in file for file in files for place in waits))


# Between nodes of a run.
TOKEN = bytes(range(32))


def _tell_left(why: str) -> None:
    tell("point", f"left: {why}")


def _named(function: str) -> Any:
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module or "trainings"), name)


class Training:
    """The training thread, as a worker has one. With `in_loop` in its configuration the function stays in its loop;
    with `ahead` it is called before there is a generation."""

    def __init__(self) -> None:
        self.runner: Any = None
        self._coordinators: dict[Any, Any] = {}
        self._begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # As a worker has one for all its generations.
        self._call: Any = None
        self._called: tuple[str, dict[str, Any]] | None = None
        self._slow_s: float | None = None
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def begin(self, value: Any) -> None:
        from elastic.checkpoint.memory.snapshot_client import SnapshotClient
        from elastic.checkpoint.memory.source import MemorySource
        from elastic.core.generation_spec import GenerationSpec
        from elastic.training.local import LocalCoordinator
        from elastic.training.loop import GenerationRunner

        class Telling(LocalCoordinator):
            node: Any = None

            def memory(self) -> Any:
                if "memory" in config:
                    self.node = SnapshotClient(config["memory"][spec.rank], TOKEN)
                return self.node

            def source(self) -> Any:
                manifest, holders = config.get("held", (None, {}))
                whole = MemorySource(lambda _: manifest, holders, TOKEN, timeout_s=30.0)
                return super().source() if manifest is None else whole

            def close(self, wait: bool) -> None:
                super().close(wait)
                if self.node is not None:
                    self.node.close()

            def shard_server(self) -> Any:
                servers = config.get("servers")
                return None if servers is None else (servers[spec.nodes[spec.rank]], TOKEN)

            def passes(self, described: Any) -> None:
                told["model passes"] = described

            def recorded(self, recording: Any) -> None:
                told["recording"] = recording
                if config.get("places"):
                    _recording_of(config).write_bytes(recording)

            def committed(self, manifest: Any) -> None:
                point(f"committed step {manifest.step}")

        _, config, fields, rendezvous, end_at = value
        spec = GenerationSpec(**fields)
        coordinator = Telling(spec, rendezvous, config["url"], end_at)

        def on_result(result: Any) -> None:
            # A rank whose memory has changed may have refused its part of the last snapshot: nobody waits for that.
            sound = result.bad_step is None or result.bad_step.sound_step is None
            whole = result.kind == "finished" or (result.kind == "anomaly" and sound)
            coordinator.close(wait=whole or (result.kind == "ended" and result.step == end_at))

        self.runner = GenerationRunner(spec, coordinator, rendezvous, on_result)
        self._coordinators[self.runner] = coordinator
        self._begun.put((value, self.runner))

    def _train(self) -> None:
        while True:
            (fn, config, *_), runner = self._begun.get()
            try:
                self._run(fn, config, runner)
            except BaseException:
                tell("broken", traceback.format_exc())
                raise

    def _run(self, fn: str, config: dict[str, Any], runner: Any) -> None:
        from elastic.training.in_loop import function_call

        self._slow_s = self._slow_s or function_call._SLOW_S
        function_call._SLOW_S = config.get("slow_s", self._slow_s)
        new = self._call is None or self._called != (fn, config)
        # Of one function in one process, however often it was left.
        calls = {} if new or "calls" not in told else {"calls": told["calls"]}
        told.clear()
        told.update(calls)
        indices.clear()
        function = _named(fn)
        if config.get("in_loop"):
            if new:
                self._call = function_call.FunctionCall(function, config, self._next, _tell_left)
                self._called = (fn, config)
            # A worker calls it ahead of its first generation alone.
            ahead = config.get("ahead") and (new or not config.get("places"))
            runner, result = self._call.run(_ahead(runner, config) if ahead else runner)
        else:
            result = runner.run(function, config)
        self._left(runner, result)

    def _next(self, runner: Any, result: Any) -> Any:
        self._left(runner, result)
        _, following = self._begun.get()
        indices.clear()
        return following

    def _left(self, runner: Any, result: Any) -> None:
        from elastic.comm.process_group import await_dropped
        from elastic.comm.rendezvous import release_store
        from elastic.comm.sockets import tcp_sockets

        await_dropped()
        coordinator = self._coordinators.pop(runner)
        # Of a generation that has ended before it was joined: a worker closes it with the next one.
        release_store(runner.generation.group.rendezvous)
        # There is none where the process has left before it joined.
        store = int(os.environ.get("MASTER_PORT", 0))
        tell(
            "outcome",
            Outcome(
                result,
                runner.clean,
                coordinator.reports,
                coordinator.restores,
                list(indices),
                dict(told),
                threading.active_count(),
                len(os.listdir("/proc/self/fd")),
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                [
                    held
                    for held in tcp_sockets()
                    if (held.peer or held.listening) and store not in (held.local[1], (held.peer or held.local)[1])
                ],
            ),
        )


def _ahead(runner: Any, config: Mapping[str, Any]) -> Any:
    from elastic.core.mesh import Mesh
    from elastic.engines.select import engine_kind
    from elastic.training.in_loop.ahead import Ahead

    def first(rehearsal: Any) -> Any:
        point("waits")
        return runner

    spec = runner.spec
    kind, passes = engine_kind(spec.engine), config.get("passes", ())
    place = config.get("places", {}).get((spec.generation, spec.rank), config.get("place"))
    return Ahead(spec.run_id, spec.seed, kind, first, passes=lambda: passes, rehearsed=point, place=lambda: place,
        alone=replace(spec, generation=1, rank=0, world_size=1, checkpoint=None, sp=1, tp=1, ep=1, pp=1),
        mesh=lambda size: Mesh.of(size, spec.sp, spec.tp, spec.ep, spec.pp),
        recording=lambda: _told_recording(config))  # fmt: skip


def _recording_of(config: Mapping[str, Any]) -> Path:
    """Where a controller keeps it."""
    return Path(config["url"], "recording")


def _told_recording(config: Mapping[str, Any]) -> bytes | None:
    if not config.get("places"):
        return bytes(config.get("recording", b""))
    return _recording_of(config).read_bytes() if _recording_of(config).exists() else None

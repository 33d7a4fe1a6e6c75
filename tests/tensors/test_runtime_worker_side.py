"""The parts of a worker that talk: heartbeats, the outbox, and the promise to stop at a step."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.core.errors import Fenced, GenerationEnded, IntegrityError, StorageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import CommunicationSettings, FailureSettings
from elastic.runtime import storage_retry
from elastic.runtime.messages import Item, Reply
from elastic.runtime.node.agent import AgentActor
from elastic.runtime.node.heartbeats import HeartbeatSender, open_mailbox, receive
from elastic.runtime.processes import is_stopped
from elastic.runtime.storage_retry import RetryingSource
from elastic.runtime.worker.logs import log_file, placed
from elastic.runtime.worker.outbox import Outbox
from elastic.runtime.worker.ray_coordinator import RayCoordinator
from elastic.training.session import Phase, Stop

LIMIT_S = 20.0


class Controller:
    """Takes batches; `answers` says what to do with each, the last answer for all that follow."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.taken: queue.Queue[list[Item]] = queue.Queue()

    def __call__(self, items: Sequence[Item], heard: int | None) -> Reply:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        self.taken.put(list(items))
        return answer

    def items(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            found += [item.data for item in self.taken.get(timeout=LIMIT_S)]
        return found


def outbox(controller: Controller, fenced: Callable[[], None] = lambda: None) -> Outbox:
    return Outbox(controller, on_fenced=fenced, retry_s=0.001)


def test_messages_are_delivered_in_order_and_only_once() -> None:
    controller = Controller(Reply(1))
    box = outbox(controller)
    for number in range(50):
        box.put(Item("event", str(number), urgent=number % 7 == 0))
    assert controller.items(50) == [str(number) for number in range(50)]
    assert box.drained(LIMIT_S)
    box.close()


def test_nothing_is_lost_while_the_controller_is_away() -> None:
    away = ray.exceptions.ActorUnavailableError("restarting", None)
    controller = Controller(away, away, away, Reply(1))
    box = outbox(controller)
    box.put(Item("event", "first"))
    box.put(Item("event", "second"))
    assert controller.items(2) == ["first", "second"]
    box.close()


def test_a_worker_that_was_written_off_learns_it_from_any_reply() -> None:
    fenced = threading.Event()
    box = outbox(Controller(Reply(1, fenced=True)), fenced.set)
    box.put(Item("event", "late"))
    assert fenced.wait(LIMIT_S)
    box.close()


def test_the_kernel_attests_who_sends_a_heartbeat() -> None:
    box, name = open_mailbox()
    box.setblocking(True)
    heart = HeartbeatSender(7, name, 0.001, 60.0, lambda: None)
    try:
        # Blocking here until one is there: what `receive` then finds is at least the next one.
        box.recv(4096)
        box.setblocking(False)
        messages: list[tuple[int, dict[str, Any]]] = []
        while not messages:
            messages = receive(box)
        pid, message = messages[0]
        assert pid == os.getpid()
        assert message == {"worker": 7}
    finally:
        heart.stop()
        box.close()


def test_nonsense_in_the_mailbox_is_dropped() -> None:
    box, name = open_mailbox()
    code = (
        "import socket,sys;s=socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM);"
        "s.sendto(b'\\xff not json', sys.argv[1]);s.sendto(b'{\"worker\": 1}', sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, name], check=True, timeout=LIMIT_S)
    messages = receive(box)
    box.close()
    assert [message for _, message in messages] == [{"worker": 1}]
    assert messages[0][0] != os.getpid()


def test_a_worker_whose_agent_is_gone_is_orphaned_once() -> None:
    box, name = open_mailbox()
    box.close()
    orphaned = threading.Event()
    heart = HeartbeatSender(0, name, 0.001, 0.005, orphaned.set)
    assert orphaned.wait(LIMIT_S)
    heart.stop()


def test_a_stopped_process_is_told_from_a_busy_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os,signal;os.kill(os.getpid(),signal.SIGSTOP)"])
    try:
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        assert not is_stopped(os.getpid())
    finally:
        process.kill()
        process.wait(LIMIT_S)
    assert not is_stopped(process.pid)


def test_each_line_of_a_redirected_process_has_its_generation_and_rank(tmp_path: Path) -> None:
    path = tmp_path / "run" / "logs" / "worker-0001.log"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from elastic.runtime.worker.logs import begin_generation, redirect\n"
        "assert redirect(Path(sys.argv[1])); print('set-up'); begin_generation(2, 1, 3)\n"
        "os.write(2, b'native\\n'); begin_generation(4, 0, 2); print('last')"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    with path.open() as lines:
        found = [(line.text.strip(), line.generation, line.rank) for line in placed(lines)]
    assert [line for line in found if not line[0].startswith("---")] == [
        ("set-up", None, None), ("native", 2, 1), ("last", 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("run_id", ["../out", "/abs", "a/b"])
def test_a_log_file_cannot_leave_its_run(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="run"):
        log_file(str(tmp_path), run_id, 1)


def test_prints_stay_with_ray_where_storage_cannot_append(tmp_path: Path) -> None:
    assert log_file("memory://bucket", "run", 1) is None
    assert log_file(str(tmp_path), "run", 1) == tmp_path / "run" / "logs" / "worker-0001.log"


# --- the promise to stop at a step ---


class Told:
    """Collects what a member tells, without a controller."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)

    def events(self) -> list[ev.Event]:
        return [ev.from_json(item.data) for item in self.items if item.kind == "event"]


def member(told: Told, timeout_s: float = LIMIT_S, **more: Any) -> RayCoordinator:
    spec = GenerationSpec("run", generation=4, rank=1, world_size=2, **more)
    box: Any = told
    source: Any = None
    writer: Any = None
    return RayCoordinator(spec, 9, box, source, writer, FailureSettings(drain_timeout_s=timeout_s))


def report(step: int) -> StepReport:
    return StepReport(step, 1.0, ((0, 2),), 2, 0.1)


def test_a_member_tells_when_it_has_joined_and_when_it_trains() -> None:
    told = Told()
    one = member(told)
    one.phase(Phase.JOINING)
    one.phase(Phase.BUILDING)
    assert not one.boundary(20)
    assert not one.boundary(21)
    assert told.events() == [ev.GroupJoined(4, 9), ev.TrainingReached(4, 9, 20, "")]


def test_only_the_first_step_of_a_generation_is_urgent() -> None:
    told = Told()
    one = member(told)
    for step in (1, 2, 3):
        one.step_done(report(step))
    assert [item.urgent for item in told.items] == [True, False, False]
    assert all((item.data.generation, item.data.rank) == (4, 1) for item in told.items)


def test_a_member_holds_at_the_promised_step_until_it_is_told_where_to_stop() -> None:
    one = member(Told())
    assert not one.boundary(5)
    promised = one.propose_stop()
    assert promised == (6, False)
    assert one.propose_stop() == promised, "asking again changes nothing"
    stops: queue.Queue[tuple[int, Stop | None]] = queue.Queue()

    def train() -> None:
        step, stop = 5, None
        while stop is None:
            step += 1
            stop = one.boundary(step)
            stops.put((step, stop))

    thread = threading.Thread(target=train)
    thread.start()
    one.commit_stop(8, durable=False)
    thread.join(LIMIT_S)
    assert [stops.get_nowait() for _ in range(stops.qsize())] == [(6, None), (7, None), (8, Stop.MEMORY)]


def test_islands_promise_the_end_of_their_round() -> None:
    one = member(Told(), communication=CommunicationSettings("local", "diloco", every_steps=4))
    assert not one.boundary(5)
    assert one.propose_stop() == (8, False)


def test_a_member_of_a_generation_that_only_saves_does_no_step() -> None:
    told = Told()
    one = member(told, stops_at_start=True)
    stops: queue.Queue[Stop | None] = queue.Queue()
    thread = threading.Thread(target=lambda: stops.put(one.boundary(13)))
    thread.start()
    one.commit_stop(13, durable=True)
    assert stops.get(timeout=LIMIT_S) is Stop.DURABLE
    thread.join(LIMIT_S)
    assert told.events() == [ev.TrainingReached(4, 9, 13)]
    with pytest.raises(GenerationEnded, match="did not commit a step to stop at"):
        member(Told(), 0.01, stops_at_start=True).boundary(13)


def test_an_abort_frees_a_member_that_holds() -> None:
    one = member(Told())
    one.boundary(5)
    one.propose_stop()
    raised: queue.Queue[BaseException] = queue.Queue()

    def train() -> None:
        try:
            one.boundary(6)
        except GenerationEnded as error:
            raised.put(error)

    thread = threading.Thread(target=train)
    thread.start()
    one.end("a peer was lost")
    thread.join(LIMIT_S)
    assert "a peer was lost" in str(raised.get_nowait())


def test_a_member_does_not_hold_for_ever() -> None:
    one = member(Told(), timeout_s=0.01)
    one.boundary(5)
    one.propose_stop()
    with pytest.raises(GenerationEnded, match="did not commit a step to stop at"):
        one.boundary(6)


# --- a storage that is away for a while ---


class Flaky:
    """A source that fails `times` times before it answers."""

    name = "storage"

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error = times, error

    def read(self, manifest: Any, ranges: Any) -> BytesRead:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return BytesRead(storage=42)

    def manifest(self, checkpoint_id: str) -> Any:
        return checkpoint_id


def patient(source: Any, waits: list[float], limit_s: float = 60.0) -> RetryingSource:
    return RetryingSource(source, 1.0, limit_s, waits.append)


def test_storage_that_comes_back_is_waited_for() -> None:
    waits: list[float] = []
    anything: Any = None
    assert patient(Flaky(3, StorageError("away")), waits).read(anything, ()) == BytesRead(storage=42)
    assert waits == [1.0, 2.0, 4.0]


def test_storage_that_stays_away_and_damage_are_passed_on() -> None:
    waits: list[float] = []
    anything: Any = None
    with pytest.raises(StorageError, match="away"):
        patient(Flaky(99, StorageError("away")), waits, limit_s=0.5).read(anything, ())
    with pytest.raises(IntegrityError, match="short"):
        patient(Flaky(99, IntegrityError("short")), waits).read(anything, ())
    assert waits == []


def test_a_large_state_is_read_in_parts_each_with_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_retry, "_FIRST_PART_BYTES", 40)
    moved: list[int] = []
    reads: list[Any] = []

    class Throttled:
        name = "storage"

        def read(self, manifest: Any, ranges: Sequence[ReadRange]) -> BytesRead:
            reads.append([(r.rank, r.key, r.offset, r.numel) for r in ranges])
            if len(reads) % 2:
                raise StorageError("away")
            for r in ranges:
                rows = r.offset + r.stride * torch.arange(r.rows)[:, None] + torch.arange(r.numel)
                r.target.copy_(rows.reshape(-1))
            return BytesRead(storage=sum(r.target.nbytes for r in ranges))

    waits: list[float] = []
    # One failure a part: as a whole longer than the limit.
    source: Any = Throttled()
    patient = RetryingSource(source, 1.0, 1.5, waits.append, moved.append)
    first, second, rows = torch.zeros(100), torch.zeros(7, dtype=torch.float64), torch.zeros(22 * 5)
    anything: Any = None
    ranges = [ReadRange(0, "a", 0, 100, first), ReadRange(1, "b", 5, 7, second), ReadRange(2, "c", 9, 5, rows, 22, 8)]
    assert patient.read(anything, ranges).total == sum(moved) == first.nbytes + second.nbytes + rows.nbytes
    assert torch.equal(rows.view(22, 5), 9.0 + 8 * torch.arange(22.0)[:, None] + torch.arange(5.0))
    assert torch.equal(first, torch.arange(100.0))
    assert torch.equal(second, torch.arange(5.0, 12.0, dtype=torch.float64))
    assert len(moved) > 2
    assert waits == [1.0] * len(moved)


def test_an_agent_kills_no_worker_for_a_controller_that_was_replaced() -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        agent: Any = SimpleNamespace(
            _incarnation=3, _node="node-a", _pids={7: sleeper.pid}, _forget=lambda worker: None
        )
        agent._heed = partial(AgentActor._heed, agent)
        with pytest.raises(Fenced, match="controller 2 was replaced: node node-a obeys controller 3"):
            asyncio.run(AgentActor.kill(agent, 2, 7))
        with pytest.raises(Fenced, match="controller 2"):
            asyncio.run(AgentActor.watch(agent, 2, 7, sleeper.pid, None))
        assert sleeper.poll() is None
        asyncio.run(AgentActor.kill(agent, 4, 7))
        assert sleeper.wait(30) == -signal.SIGKILL
        assert agent._incarnation == 4
    finally:
        sleeper.kill()
        sleeper.wait()

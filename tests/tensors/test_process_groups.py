"""What becomes of a process when a peer is lost under NCCL. Without NCCL: the groups are not real."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ErrorType, HashStore

from elastic.comm import device_check, process_group
from elastic.comm.nccl import first_error, outlive_peers
from elastic.comm.peer_addresses import exchange
from elastic.comm.process_group import ProcessGroup
from elastic.comm.rendezvous import host_store
from elastic.comm.sockets import Address, TcpSocket
from elastic.core import events as ev
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.core.settings import GPU_FAILURES
from elastic.runtime.worker import codec
from elastic.training import cleanup, loop
from elastic.training.local import SilentCoordinator
from elastic.training.loop import GenerationResult, GenerationRunner
from elastic.training.state import pins

LIMIT_S = 20.0


class NoEngine:
    """An `EngineKind` whose groups are somebody else's."""

    name = "none"

    def __init__(self, backend: str = "nccl") -> None:
        self.backend = backend

    def preload(self) -> None: ...

    def warm_up(self, settings: Any) -> None: ...

    def answer_user_calls(self, initialize: Any, run_id: str, spec: Any, engines_own: Any = None) -> None: ...

    def device(self, local_rank: int) -> tuple[str, torch.device]:
        return self.backend, torch.device("cpu")

    def before_join(self) -> None: ...

    def after_join(self, backend: str) -> None: ...

    def destroy_groups(self) -> None: ...

    def resolve(self, config: Any, spec: Any) -> Any:
        raise NotImplementedError

    def build(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_torch_does_not_end_a_process_that_is_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})
    outlive_peers()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    # Otherwise the watchdog thread throws a device assert of user code once more and ends the process.
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1", "the environment takes precedence"


class Stuck:
    """Its abort returns only when that of the other group has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.other: Stuck | None = None
        self.released = 0

    def abort(self) -> None:
        self.begun.set()
        assert self.other is not None
        self.released += self.other.begun.wait(LIMIT_S)


def test_no_groups_abort_waits_for_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clone = Stuck(), Stuck()
    world.other, clone.other = clone, world
    monkeypatch.setattr(process_group, "_groups", lambda: [world, clone])
    group = ProcessGroup(GenerationSpec("run", 1, 0, 2), Rendezvous("127.0.0.1", 1), NoEngine())
    group._backend, group._joined = "nccl", True
    group.abort()
    assert (world.released, clone.released) == (1, 1)
    # A group may connect after it was aborted.
    group.abort()
    assert (world.released, clone.released) == (2, 2)


class Silent:
    """A group whose failures are raised by no call; an abort releases whoever waits in it. Its backend, too."""

    def __init__(self, *errors: ErrorType | RuntimeError) -> None:
        """`errors` are the answers to those who ask; the last one stays."""
        self.errors = list(errors)
        self._device_types = [torch.device("cuda")]
        self.asked = threading.Event()
        self.aborted = threading.Event()

    def _get_backend(self, device: torch.device) -> Silent:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> ErrorType:
        self.asked.set()
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if isinstance(error, RuntimeError):
            raise error
        return error

    def abort(self) -> None:
        self.aborted.set()


# A group that has no backend for one of its devices, or that is being closed.
CLOSING = RuntimeError("No backend type associated with device type cuda")


@pytest.mark.parametrize(
    ("answers", "backend", "told"),
    [
        ([ErrorType.SUCCESS, ErrorType.SUCCESS], "nccl", None),
        ([ErrorType.SUCCESS, ErrorType.COMM_ERROR], "nccl", "nccl reports COMM_ERROR: the connection to a peer"),
        ([ErrorType.TIMEOUT, ErrorType.SUCCESS], "nccl", "nccl reports TIMEOUT"),
        ([CLOSING, ErrorType.REMOTE_ERROR], "nccl", "nccl reports REMOTE_ERROR"),
        ([CLOSING, CLOSING], "nccl", None),
        ([ErrorType.COMM_ERROR, ErrorType.COMM_ERROR], "gloo", None),
    ],
)
def test_every_group_is_asked_for_failures_that_no_call_raises(
    answers: list[Any], backend: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [Silent(answer) for answer in answers]
    monkeypatch.setattr(process_group, "_groups", lambda: groups)
    group = ProcessGroup(GenerationSpec("run", 1, 0, 2), Rendezvous("127.0.0.1", 1), NoEngine())
    group._backend, group._joined = backend, True
    error = group.error()
    assert error is None if told is None else error is not None and error.startswith(told)
    group._joined = False
    assert group.error() is None, "what is being closed fails as it likes"


@pytest.fixture
def gloo() -> Iterator[dist.ProcessGroup]:
    """A real group of one rank, as a user makes it for barriers on the CPU."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_gloo_group_beside_nccl_does_not_hide_its_failures(
    gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_error([gloo]) is None
    nccl: Any = Silent(ErrorType.COMM_ERROR)
    found = first_error([gloo, nccl])
    assert found is not None
    assert found.startswith("nccl reports COMM_ERROR")


def test_the_watch_goes_on_beside_a_gloo_group(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Silent(ErrorType.SUCCESS, ErrorType.SUCCESS, ErrorType.COMM_ERROR)
    runner = Runner(nccl, monkeypatch)
    monkeypatch.setattr(process_group, "_groups", lambda: [gloo, nccl])
    monkeypatch.setattr(ProcessGroup, "_abort", lambda self, group: nccl.abort())

    def train() -> None:
        assert nccl.aborted.wait(LIMIT_S), "the failure was not noticed"

    runner.run(train)
    (told,) = runner.results
    assert "nccl reports COMM_ERROR" in told.message


class Runner(GenerationRunner):
    """Over a group as of NCCL. `results` are those that were announced."""

    def __init__(self, group: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cleanup, "warm_up", lambda kind: None)
        monkeypatch.setattr(loop, "_ASK_EVERY_S", 0.001)
        monkeypatch.setattr(process_group, "_groups", lambda: [group])
        monkeypatch.setattr(ProcessGroup, "join", self._join)
        self.results: list[GenerationResult] = []
        spec, where = GenerationSpec("run", 3, 0, 2), Rendezvous("127.0.0.1", 1)
        super().__init__(spec, SilentCoordinator(), where, on_result=self.results.append, kind=NoEngine())

    def _join(self, check: Any) -> torch.device:
        self._group._backend, self._group._joined = "nccl", True
        return torch.device("cpu")


def test_a_failure_that_no_call_raises_is_told_and_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Silent(ErrorType.SUCCESS, ErrorType.SUCCESS, ErrorType.COMM_ERROR)
    runner = Runner(group, monkeypatch)

    def train() -> None:
        assert group.aborted.wait(LIMIT_S)
        # What an aborted collective leaves behind is not the user's mistake.
        raise ValueError("the loss makes no sense")

    result = runner.run(train)
    (told,) = runner.results
    event = codec.outcome(told, 3, 7)
    assert isinstance(event, ev.CollectiveFailed)
    assert (event.generation, event.worker) == (3, 7)
    assert event.error.startswith("a collective failed: nccl reports COMM_ERROR")
    assert result.kind == "ended"


@pytest.mark.parametrize("way", ["finished", "ended"])
def test_what_the_end_of_a_generation_makes_a_group_report_is_no_failure(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Silent(ErrorType.SUCCESS)
    runner = Runner(group, monkeypatch)
    watches: list[threading.Thread] = []

    def fail() -> None:
        group.errors[:] = [ErrorType.COMM_ERROR]
        for watch in watches:
            watch.join(LIMIT_S)

    def train() -> None:
        watches.extend(thread for thread in threading.enumerate() if thread.name == "elastic-group")
        assert group.asked.wait(LIMIT_S)
        if way == "ended":
            runner.abort("the controller has said so")
            fail()

    def close(stays: bool) -> bool:
        if way == "finished":
            fail()
        return True

    monkeypatch.setattr(runner.generation, "close", close)
    assert runner.run(train).kind == way
    assert [result.kind for result in runner.results] == [way]
    assert [watch.is_alive() for watch in watches] == [False]
    assert group.aborted.is_set() == (way == "ended")


class Blackboard:
    """A store of one process; counts the messages and bytes that are read and written in it."""

    def __init__(self) -> None:
        self.moved = self.bytes = 0
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        with self._changed:
            self.moved += len(keys)
            self.bytes += sum(map(len, values))
            self._values.update(zip(keys, values, strict=True))
            self._changed.notify_all()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._values.keys() >= set(keys), LIMIT_S)
            found = [self._values[key] for key in keys]
            self.moved += len(keys)
            self.bytes += sum(map(len, found))
            return found


def host(rank: int) -> str:
    return f"10.0.0.{rank}"


def sockets_of(rank: int, world_size: int) -> list[TcpSocket]:
    """As gloo has them: who has the larger rank connects, from a port that says who and to whom."""

    def sock(local: Address, peer: Address | None) -> TcpSocket:
        return TcpSocket(3, "socket:[1]", peer is None, local, peer)

    smaller = [sock((host(rank), 1000 + other), (host(other), 7)) for other in range(rank)]
    larger = [sock((host(rank), 7), (host(other), 1000 + rank)) for other in range(rank + 1, world_size)]
    elsewhere = sock((host(rank), 9999), ("192.168.0.1", 443))
    return [sock((host(rank), 7), None), *smaller, *larger, elsewhere]


def test_everybody_knows_whose_socket_is_at_the_other_end_and_nobody_asks_everybody() -> None:
    world_size, store = 24, Blackboard()
    board: Any = store

    def told(rank: int) -> Any:
        return exchange(board, "addresses/", rank, world_size, sockets_of(rank, world_size))

    with ThreadPoolExecutor(world_size) as pool:
        peers = list(pool.map(told, range(world_size)))
    for rank, known in enumerate(peers):
        others = [other for other in range(world_size) if other != rank]
        assert known.listening == {(host(other), 7) for other in others}
        ends = [found.peer for found in sockets_of(rank, world_size)[1:-1]]
        assert [known.rank_at[end] for end in ends if end is not None] == others
        # What leads elsewhere is nobody's business here.
        assert len(known.rank_at) == len(others) + sum(other > rank for other in others)
    assert store.moved <= 6 * world_size, "the messages of a thousand ranks are to be thousands, not a million"
    connections = world_size * (world_size - 1) // 2
    assert store.bytes < 100 * connections, "each connection is told by one end"


class Destroys(NoEngine):
    def destroy_groups(self) -> None:
        dist.destroy_process_group()


def test_tracebacks_have_the_rank_once_however_many_groups_there_were() -> None:
    before = sys.excepthook
    for number in (1, 2, 3):
        group = ProcessGroup(GenerationSpec("run", number, 0, 1), host_store("127.0.0.1"), Destroys("gloo"))
        group.join(lambda: None)
        assert sys.excepthook is not before, "torch's own, while there is a group"
        group.close()
        assert sys.excepthook is before


def test_what_an_optimizer_of_the_users_keeps_does_not_hinder_leaving() -> None:
    """Not every optimizer's state is a mapping by names."""
    weight, moment, master = nn.Parameter(torch.zeros(3)), torch.ones(3), torch.zeros(3)
    state = {weight: moment, master: {"step": 3, "average": torch.ones(2)}, "scale": 2.0}
    module = nn.ParameterList([weight])
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}, {"params": [master]}], state=state)
    made = cleanup.made_by(SimpleNamespace(optimizer=optimizer, module=module))
    assert [ref() is moment or ref() is master for ref in made] == [True, True, False], "not the model's own"
    assert cleanup.outlived(made)
    del state, optimizer, moment, master
    assert not cleanup.outlived(made)


def test_leaving_a_generation_on_a_device_may_take_as_long_as_its_parts_may() -> None:
    """A worker that is within all of its own limits must not be replaced for a hang."""
    parts_s = process_group._ABORT_LIMIT_S + pins._LIMIT_S + device_check._LIMIT_S
    assert GPU_FAILURES["abort_timeout_s"] > parts_s

"""When communicators are made, and that a rank that waits for its peers can be released. The groups are not NCCL's."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.comm import nccl, process_group
from elastic.comm.process_group import ProcessGroup
from elastic.comm.rendezvous import host_store, release_store
from elastic.core.generation_spec import GenerationSpec, Rendezvous

LIMIT_S = 20.0
CUDA = torch.device("cuda", 0)


class Group:
    """A group and its backend, whose communicator is made when it is asked for."""

    def __init__(self, size: int = 2, backend: str = "nccl", used: bool = False) -> None:
        self._size, self._backend, self.used = size, backend, used
        self._device_types = [torch.device("cuda")]
        self.connected = 0

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def name(self) -> str:
        return self._backend

    def _is_initialized(self) -> bool:
        return self.used

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected += 1


def test_every_group_is_connected_once_and_by_nobodys_first_collective() -> None:
    world, clone, lone, gloo, used = Group(), Group(), Group(size=1), Group(backend="gloo"), Group(used=True)
    communicators = nccl.Communicators(CUDA)
    known: list[Any] = [world, lone, gloo, used]
    communicators.connect(known)
    # torch says only after the first collective that a communicator is there.
    communicators.connect([*known, clone])  # type: ignore[list-item]
    assert [group.connected for group in (world, clone, lone, gloo, used)] == [1, 1, 0, 0, 0]


def test_what_the_environment_sets_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"})
    nccl.outlive_peers()
    nccl.limit_connecting(0.5)
    nccl.limit_connecting(600.0)
    assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "1"


class Hooks:
    def device(self, local_rank: int) -> tuple[str, torch.device]:
        return "nccl", CUDA

    def before_join(self) -> None: ...

    def after_join(self, backend: str) -> None: ...

    def destroy_groups(self) -> None: ...


@pytest.fixture
def where() -> Iterator[Rendezvous]:
    rendezvous = host_store("127.0.0.1")
    yield rendezvous
    release_store(rendezvous)


class Line:
    """Ranks that join in threads of this process; `steps` is what they have done, in this order."""

    def __init__(self, where: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where, self.steps = where, list[tuple[str, Any]]()
        self.at_the_line = threading.Semaphore(0)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        self.allocator = ""
        monkeypatch.setattr(torch.cuda, "set_device", self._set_device)
        monkeypatch.setattr(dist, "init_process_group", self._init)
        monkeypatch.setattr(process_group, "_groups", lambda: [])
        monkeypatch.setattr(nccl.Communicators, "connect", lambda *_: self.steps.append(("connect", None)))

    def _set_device(self, device: torch.device) -> None:
        self.allocator = os.environ.get("PYTORCH_ALLOC_CONF", "")

    def _init(self, backend: str, *, device_id: Any = None, **_: Any) -> None:
        self.steps.append(("init", device_id))
        self.at_the_line.release()

    def join(self, rank: int) -> tuple[ProcessGroup, threading.Thread, list[BaseException]]:
        group, raised = ProcessGroup(GenerationSpec("run", 1, rank, 2), self.where, Hooks()), list[BaseException]()

        def run() -> None:
            try:
                group.join(lambda: None)
            except dist.DistError as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert self.at_the_line.acquire(timeout=LIMIT_S)
        return group, thread, raised


def test_no_communicator_is_made_before_every_rank_has_its_group(
    where: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(where, monkeypatch)
    _, first, _ = line.join(0)
    assert line.steps == [("init", None)], "a bound group is connected before an abort could find it"
    _, second, _ = line.join(1)
    for thread in (first, second):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert [step for step, _ in line.steps] == ["init", "init", "connect", "connect"]
    assert line.allocator == "expandable_segments:True", "set when the device is first used"


def test_a_rank_whose_peer_never_comes_is_released_by_an_abort(
    where: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(where, monkeypatch)
    group, thread, raised = line.join(0)
    limit = threading.Event()
    timer = threading.Timer(LIMIT_S, limit.set)
    timer.start()
    while thread.is_alive() and not limit.is_set():
        # As often as the runner does it: the rank may not have asked the store yet.
        group.abort()
        thread.join(0.01)
    timer.cancel()
    assert not thread.is_alive()
    assert len(raised) == 1
    assert line.steps == [("init", None)]


class Held(Group):
    """Its communicator is being connected: an abort waits for torch's lock until the sockets are shut down."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = threading.Event()
        self.aborted = False

    def abort(self) -> None:
        self.aborted = self.cut.wait(LIMIT_S)


def test_an_abort_that_waits_for_a_connection_ends_when_its_sockets_are_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held()
    monkeypatch.setattr(process_group, "_groups", lambda: [held])
    monkeypatch.setattr(process_group, "_ABORT_S", 0.001)
    monkeypatch.setattr(process_group.sockets, "tcp_sockets", lambda: held.cut.set() or [])
    group = ProcessGroup(GenerationSpec("run", 1, 0, 2), Rendezvous("127.0.0.1", 1), Hooks())
    group._backend, group._joined = "nccl", True
    group.abort()
    assert held.aborted

"""Copies concurrently with training: no optimizer step overtakes one; errors are reported before the next update."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.errors import ElasticError
from elastic.training.state import host
from elastic.training.state import pins as pins_module
from elastic.training.state.copier import Copier
from elastic.training.state.host import HostPool, Transfer, transfer
from elastic.training.state.pins import Pins

LIMIT_S = 20.0


class Held(Transfer):
    """A copy that is made when the test says so."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__([(target, source)], [])
        object.__setattr__(self, "go", threading.Event())

    def enqueue(self) -> None:
        assert self.go.wait(LIMIT_S)  # type: ignore[attr-defined]
        super().enqueue()


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(torch.device("cpu"))
    yield made
    made.close()


def test_an_update_waits_until_what_it_changes_was_copied(copier: Copier) -> None:
    source, target = torch.ones(8), torch.zeros(8)
    copy, fenced = Held(target, source), threading.Event()
    copier.start(copy, lambda: None)

    def update() -> None:
        copier.fence()
        fenced.set()
        source.add_(1.0)

    training = threading.Thread(target=update)
    training.start()
    assert not fenced.wait(0.1), "the update has overtaken the copy"
    copy.go.set()  # type: ignore[attr-defined]
    training.join(LIMIT_S)
    assert copier.drain(LIMIT_S)
    assert source.tolist() == [2.0] * 8
    assert target.tolist() == [1.0] * 8


def test_what_follows_is_told_when_everything_is_there(copier: Copier) -> None:
    source, target, seen = torch.arange(4.0), torch.full((4,), 9.0), []
    copier.start(Transfer([(target[:3], source[:3])], [target[3:]]), lambda: seen.append(target.tolist()))
    assert copier.drain(LIMIT_S)
    assert seen == [[0.0, 1.0, 2.0, 0.0]]


def test_a_copy_that_failed_stops_the_next_update_and_is_not_told_as_done(copier: Copier) -> None:
    told: list[str] = []
    copier.start(Transfer([(torch.zeros(3), torch.ones(4))], []), lambda: told.append("done"))
    with pytest.raises(ElasticError, match="could not be copied"):
        copier.fence()
    assert copier.drain(LIMIT_S)
    assert told == []
    assert copier.fence() == 0.0


def test_closing_finishes_what_was_started(copier: Copier) -> None:
    source, target = torch.ones(8), torch.zeros(8)
    copier.start(Transfer([(target, source)], []), lambda: None)
    copier.close()
    assert target.tolist() == [1.0] * 8


class Stream:
    """A device's stream on which everything is done at once: see `DeviceStream`."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def follow(self) -> None: ...

    def used(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.seen.append("waited"), query=lambda: False)

    def wait(self, mark: Any) -> None:
        self.seen.append("the stream waits")


class Place:
    """A tensor that says who fills it."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def copy_(self, source: Any, non_blocking: bool) -> None:
        where = "device" if source.is_cuda else "host"
        self.seen.append(f"{where} by {threading.current_thread().name}")


def test_what_lies_in_host_memory_is_copied_beside_the_training_on_a_device_too(copier: Copier) -> None:
    """An offloaded optimizer: gigabytes that the training thread would stand still for."""
    seen: list[str] = []
    stream: Any = Stream(seen)
    copier._stream = copier._training = stream
    moves: Any = [(Place(seen), SimpleNamespace(is_cuda=False)), (Place(seen), SimpleNamespace(is_cuda=True))]
    copier.start(Transfer(moves, []), lambda: None)
    copier.fence()
    assert copier.drain(LIMIT_S)
    assert sorted(seen) == ["device by MainThread", "host by elastic-copier", "the stream waits", "waited"]


class Driver:
    """What is left of CUDA's runtime: a refusal is told once more to whoever launches the next kernel."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.last_error = refuses, 0
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.last_error = 1 if self.refuses else 0
        if not self.refuses:
            self.registered.add(address)
        return self.last_error

    def cudaHostUnregister(self, address: int) -> int:
        self.last_error = 0 if address in self.registered else 713
        self.registered.discard(address)
        return self.last_error

    def launch(self, *_: Any, **__: Any) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_that_cannot_be_pinned_harms_nobody(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(refuses)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(pins_module, "done", lambda device: True)
    monkeypatch.setattr(torch, "ones", driver.launch)
    memory, pins = torch.zeros(64, dtype=torch.uint8), Pins(torch.device("cuda"))
    for _ in range(2):
        pins.pin(memory)
        driver.launch()
    assert bool(driver.registered) is not refuses
    pins.close()
    driver.launch()
    assert driver.registered == set()


def test_memory_into_which_the_device_still_writes_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(refuses=False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(pins_module, "DeviceStream", lambda device: Stream([]))
    monkeypatch.setattr(pins_module, "_LIMIT_S", 0.0)
    kept: list[Any] = []
    monkeypatch.setattr(pins_module, "_KEPT", kept)
    memory, pins = torch.zeros(64, dtype=torch.uint8), Pins(torch.device("cuda"))
    pins.pin(memory)
    pins.close()
    pins.close()
    assert driver.registered == {memory.data_ptr()}
    assert [tensor is memory for found in kept for tensor in found.values()] == [True], (
        "unmapped, it would be another's"
    )


def test_what_cannot_wait_is_enqueued_on_the_device_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the training thread waits once per tensor; in stage 0 these are the whole state."""
    enqueued: list[bool] = []

    class Source:
        is_cuda = True
        device = torch.device("cuda", 0)

        def detach(self) -> Source:
            return self

        def reshape(self, _: int) -> Source:
            return self

    class Target(Place):
        def copy_(self, source: Any, non_blocking: bool) -> None:
            enqueued.append(non_blocking)

    wanted: Any = [SimpleNamespace(key="a", source=Source(), at_once=True, gaps=())]
    targets: Any = {"a": Target([])}
    made = transfer(wanted, targets)
    assert enqueued == [True]
    assert (list(made.moves), made.device) == ([], torch.device("cuda", 0))
    waits: list[str] = []
    monkeypatch.setattr(host, "DeviceStream", lambda device: Stream(waits))
    made.run()
    assert waits == ["waited"], "who wants it all at once waits for it"


def test_memory_for_snapshots_is_not_inherited_by_data_workers() -> None:
    slab = HostPool(torch.device("cpu"))._slab(5 << 20)
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", maps):
        begin, end = (int(number, 16) for number in area.split(" ", 1)[0].split("-")) if area else (0, 0)
        if begin <= slab.data_ptr() < end:
            assert "dc" in area.partition("VmFlags:")[2].split(), "copied at each fork"
            return
    raise AssertionError("the slab is in no mapping")

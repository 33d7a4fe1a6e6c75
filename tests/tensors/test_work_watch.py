"""What counts as progress of a training thread that calls nothing of ours."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from elastic.core.generation_spec import GenerationSpec
from elastic.runtime.worker import work_watch
from elastic.runtime.worker.work_watch import SetUpWatch, WorkWatch
from elastic.training.busy import reporting
from elastic.training.local import SilentCoordinator
from elastic.training.scope import GenerationScope
from elastic.training.session import Phase


class Used:
    """Processor time in the test's hands, and the clock with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.seconds = 100.0
        monkeypatch.setattr(work_watch.time, "monotonic", lambda: self.now)

    def passes(self, seconds: float, share: float) -> None:
        self.now, self.seconds = self.now + seconds, self.seconds + share * seconds


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return Used(monkeypatch)


def scope_in(phase: Phase, device: str = "cpu") -> GenerationScope:
    scope = GenerationScope(GenerationSpec("run", 1, 0, 1), SilentCoordinator(), torch.device(device))
    scope.phase = phase
    return scope


def watch_of(scope: GenerationScope, used: Used, thread: int | None = None) -> WorkWatch:
    return WorkWatch(scope, thread, lambda: used.seconds)


@contextmanager
def inside(module: str, function: str) -> Iterator[int]:
    """A thread whose stack has that function of that module; its identity."""
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(60.0)

    foreign = ModuleType(module)
    exec(f"def {function}(call): call()", foreign.__dict__)
    call: Callable[[Callable[[], None]], None] = getattr(foreign, function)
    thread = threading.Thread(target=call, args=(wait,))
    thread.start()
    assert reached.wait(60.0)
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        go_on.set()
        thread.join(60.0)


@pytest.mark.parametrize(
    ("phase", "device", "counts"),
    [
        (Phase.IDLE, "cpu", True),
        (Phase.BUILDING, "cuda", True),
        (Phase.JOINING, "cpu", False),
        (Phase.TRAINING, "cpu", True),
        (Phase.TRAINING, "cuda", False),
    ],
)
def test_processor_time_counts_before_the_first_step_has_ended(
    phase: Phase, device: str, counts: bool, used: Used
) -> None:
    scope = scope_in(phase, device)
    watch = watch_of(scope, used)
    used.passes(1.0, 0.9)
    assert watch.works() is counts
    used.passes(1.0, 0.05)
    assert not watch.works(), "a worker that waits"
    used.passes(1.0, 0.9)
    assert watch.works() is counts
    scope.phase = Phase.TRAINING
    watch.works()
    scope.step += 1
    used.passes(1.0, 0.9)
    assert not watch.works(), "from the first step on steps tell"


def test_a_set_up_before_its_worker_is_ready(used: Used) -> None:
    watch = SetUpWatch(lambda: used.seconds)
    used.passes(100.0, 0.3)
    assert watch.works()
    used.passes(100.0, 0.05)
    assert not watch.works(), "it waits for a download, say"
    with reporting(None, "reading", 1000.0):
        used.passes(100.0, 0.0)
        assert watch.works(), "which it may declare"
    used.passes(4000.0, 0.9)
    assert not watch.works(), "an endless loop computes, too"


def test_what_was_used_while_the_group_was_joined_is_not_the_set_ups(used: Used) -> None:
    scope = scope_in(Phase.JOINING)
    watch = watch_of(scope, used)
    used.passes(1.0, 0.9)
    assert not watch.works()
    scope.phase = Phase.BUILDING
    used.passes(1.0, 0.9)
    assert not watch.works(), "part of it was"
    used.passes(1.0, 0.9)
    assert watch.works()


def test_a_set_up_in_an_endless_loop_is_a_hang_in_the_end(used: Used) -> None:
    watch = watch_of(scope_in(Phase.BUILDING), used)
    used.passes(3599.0, 1.0)
    assert watch.works()
    used.passes(2.0, 1.0)
    assert not watch.works()


def test_a_collective_that_waits_is_no_progress(used: Used) -> None:
    with inside("torch.distributed.distributed_c10d", "barrier") as thread:
        watch = watch_of(scope_in(Phase.BUILDING, "cuda"), used, thread)
        used.passes(1.0, 1.0)
        assert not watch.works()


@pytest.mark.parametrize(("module", "function"), sorted(work_watch._COMPILERS))
def test_a_compiler_is_progress_at_any_time(module: str, function: str, used: Used) -> None:
    with inside(module, function) as thread:
        scope = scope_in(Phase.TRAINING)
        watch = watch_of(scope, used, thread)
        watch.works()
        scope.step = 7
        assert watch.works()


def test_a_block_that_says_it_is_busy_is_progress_in_a_set_up_ahead(used: Used) -> None:
    watch = watch_of(scope_in(Phase.IDLE), used)
    with reporting(None, "downloading", 60.0):
        assert watch.works()
    assert not watch.works()


@pytest.mark.parametrize(("module", "function"), sorted(work_watch._COMPILERS))
def test_the_compilers_have_these_names(module: str, function: str) -> None:
    if module.startswith("triton") and find_spec("triton") is None:
        pytest.skip("no Triton in this installation")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"def {function}(" in Path(spec.origin).read_text()


def test_torch_calls_its_compiler_from_there() -> None:
    compiled: list[bool] = []

    def look(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(work_watch._found(sys._getframe())[1])
        return graph.forward

    torch.compile(lambda x: x + 1, backend=look)(torch.ones(2))
    assert compiled == [True]

"""Work of the training thread that is seen from outside: a set-up that computes, and a compiler, are no hangs.

The user's code calls nothing of ours there: it reads and tokenizes a dataset, builds a model, compiles an operator in
another process, or is inside of torch.compile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from elastic.runtime.processes import processor_s
from elastic.training import busy
from elastic.training.scope import MOVED_EVERY_S, GenerationScope
from elastic.training.session import Phase

# A set-up in an endless loop computes, too: from then on it counts as a hang.
_LIMIT_S = 3600.0
# Of one processor. A worker that waits uses some hundredths for its heartbeats and Ray's threads.
_COMPUTES = 0.2
# What is on the stack while something is compiled, and is not when what was compiled runs.
_COMPILERS = frozenset(
    {
        ("torch._dynamo.convert_frame", "_compile"),
        ("torch._inductor.compile_fx", "_compile_fx_inner"),
        ("torch.utils.cpp_extension", "_jit_compile"),
        ("triton.compiler.compiler", "compile"),
    }
)
# With NCCL a thread that waits for its peers computes.
_COLLECTIVES = "torch.distributed.distributed_c10d"
_SET_UP = (Phase.IDLE, Phase.BUILDING)


class WorkWatch:
    """Reports progress every second for a generation of this process, from the moment that the process knows of it:
    its function may still do the set-up that it was called for ahead.

    Progress is: a block of `elastic.busy`; before the first step has ended, processor time of this process and of those
    that it has started; at any time, a compiler on the training thread's stack. A collective that waits is none.
    """

    def __init__(
        self, scope: GenerationScope, training_thread: int | None, used_s: Callable[[], float] | None = None
    ) -> None:
        self._scope = scope
        self._training_thread = training_thread
        # A compiler that still runs, or a pool of processes, is in no figure of this process alone.
        self._processor_s = used_s or (lambda: processor_s(os.getpid(), descendants=True))
        self._until = time.monotonic() + _LIMIT_S
        self._first_step: int | None = None
        # None while the processor's time does not tell.
        self._used_s: float | None = self._processor_s()
        self._looked_at = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._run, name="elastic-work", daemon=True).start()

    def works(self) -> bool:
        """Has the user's code made progress since this was last asked?"""
        now, used_s = time.monotonic(), self._processor_s() if self._begins() else None
        before_s, passed_s = self._used_s, max(1e-9, now - self._looked_at)
        computes = used_s is not None and before_s is not None and used_s - before_s >= _COMPUTES * passed_s
        self._looked_at, self._used_s = now, used_s
        if busy.declared():
            return True
        waits, compiles = _found(sys._current_frames().get(self._training_thread or 0))
        return not waits and (compiles or (computes and now < self._until))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begins(self) -> bool:
        """Whether the processor's time tells: in the set-up, and, where no device is waited for by spinning, in the
        first step, which reads the first batches."""
        phase = self._scope.phase
        if phase is Phase.TRAINING and self._first_step is None:
            self._first_step = self._scope.step
        if self._first_step is None:
            return phase in _SET_UP
        return self._scope.step == self._first_step and self._scope.device.type == "cpu"

    def _run(self) -> None:
        scope = self._scope
        while scope.ended is None and scope.phase is not Phase.LEAVING:
            time.sleep(MOVED_EVERY_S)
            if self.works() and scope.ended is None:
                scope.coordinator.moved()


class SetUpWatch:
    """Of a set-up before its worker is ready, from now on: has it computed, or `elastic.busy` declared, since this was
    last asked?"""

    def __init__(self, used_s: Callable[[], float] | None = None) -> None:
        self._processor_s = used_s or (lambda: processor_s(os.getpid(), descendants=True))
        self._until = time.monotonic() + _LIMIT_S
        self._looked_at, self._used_s = time.monotonic(), self._processor_s()

    def works(self) -> bool:
        now, used_s = time.monotonic(), self._processor_s()
        computes = used_s - self._used_s >= _COMPUTES * (now - self._looked_at)
        self._looked_at, self._used_s = now, used_s
        return now < self._until and (computes or busy.declared())


def _found(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether the stack has a collective, and whether it has a compiler."""
    waits = compiles = False
    while frame is not None:
        module = frame.f_globals.get("__name__")
        waits = waits or module == _COLLECTIVES
        compiles = compiles or (module, frame.f_code.co_name) in _COMPILERS
        frame = frame.f_back
    return waits, compiles

"""What /proc tells about a process that computes, one that waits, and one that has ended. Real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.runtime.processes import Computing, is_stopped, processor_s

LIMIT_S = 30.0
SPINS = "while True: pass"
# As `sh -c` of a build does: what computes is a grandchild.
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{SPINS}'])"


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield process
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
        process.wait(LIMIT_S)


def used(process: int, seconds: float, descendants: bool = False) -> None:
    until = time.monotonic() + LIMIT_S
    begun_at = processor_s(process, descendants)
    while processor_s(process, descendants) < begun_at + seconds:
        assert time.monotonic() < until, "the process does not compute"
        time.sleep(0.005)


def test_who_computes_is_told_from_who_is_stopped_or_waits() -> None:
    with running(SPINS) as process:
        computing = Computing(process.pid, share=0.5, every_s=1.0, now=100.0)
        used(process.pid, 0.6)
        assert not computing.look(100.9), "not asked yet"
        assert computing.look(101.0)
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + LIMIT_S
        while not is_stopped(process.pid):
            assert time.monotonic() < until
        computing.look(200.0)
        assert computing.look(200.5) is computing.look(200.9), "the last answer holds until the next time"
        assert not computing.look(300.0)


def test_what_a_process_has_started_counts_where_that_is_asked() -> None:
    with running(STARTS) as process:
        used(process.pid, 0.3, descendants=True)
        assert processor_s(process.pid, descendants=True) > processor_s(process.pid) + 0.1


def test_a_process_that_has_ended_has_used_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(LIMIT_S)
    assert (processor_s(process.pid, descendants=True), is_stopped(process.pid)) == (0.0, False)

"""Processes are found by who started them and ended for certain, stopped ones too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from elastic_cluster.local import processes
from elastic_cluster.local.processes import Process

# Starts a child that starts a child; each writes its pid, then all wait to be killed.
_FAMILY = """
import os, subprocess, sys, time
depth = int(sys.argv[1])
print(os.getpid(), flush=True)
if depth:
    subprocess.Popen([sys.executable, __file__, str(depth - 1)], start_new_session=True)
time.sleep(600)
"""

Family = Callable[[int], list[int]]


@pytest.fixture
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Starts a chain of processes, each in a session of its own; returns their pids."""
    script = tmp_path_factory.mktemp("family") / "family.py"
    script.write_text(_FAMILY)
    with ExitStack() as stack:

        def start(depth: int) -> list[int]:
            first = subprocess.Popen([sys.executable, str(script), str(depth)], stdout=subprocess.PIPE)
            assert first.stdout is not None
            pids: list[int] = []

            def end() -> None:
                for pid in pids:
                    found = processes.read(pid)
                    if found is not None:
                        processes.send(found, signal.SIGKILL)
                first.wait()

            stack.enter_context(first.stdout)
            stack.callback(end)
            pids += [int(first.stdout.readline()) for _ in range(depth + 1)]
            return pids

        yield start


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def test_descendants_are_found_across_sessions(family: Family) -> None:
    pids = family(2)
    found = processes.table()
    assert processes.descendants([pids[0]], found) == set(pids[1:])
    assert set(pids) <= processes.descendants([os.getpid()], found)
    assert processes.descendants([pids[2]], found) == set()


def test_descendants_ends_on_a_loop() -> None:
    # A table is read entry by entry; pids that are taken again meanwhile may close a ring.
    ring = {pid: Process(pid, ppid, 1, "S", 0) for pid, ppid in ((1, 3), (2, 1), (3, 2))}
    assert processes.descendants([1], ring) == {1, 2, 3}


def test_a_stopped_family_is_killed(family: Family) -> None:
    pids = family(2)
    for pid in pids:
        found = processes.read(pid)
        assert found is not None
        processes.send(found, signal.SIGSTOP)

    def members() -> list[Process]:
        found = [process for pid in pids if (process := processes.read(pid)) is not None]
        # An orphan is not ours to reap.
        return [process for process in found if not process.zombie or process.ppid == os.getpid()]

    assert processes.kill_all(members, _reap, limit_s=10.0) == set(pids)
    assert members() == []


def test_what_cannot_be_killed_is_named() -> None:
    ghost = Process(pid=2**22 + 1, ppid=1, session=1, state="S", start_ticks=1)
    with pytest.raises(TimeoutError, match=f"waited 0 s for killed processes to be gone: .*{ghost.pid}"):
        processes.kill_all(lambda: [ghost], lambda: None, limit_s=0.0)


def test_a_process_that_took_over_a_pid_is_left_alone() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        found = processes.read(child.pid)
        assert found is not None
        processes.send(replace(found, start_ticks=found.start_ticks - 1), signal.SIGKILL)
        child.communicate()
    assert child.returncode == 0


def test_a_name_with_parentheses_and_spaces_is_read() -> None:
    command = ["/bin/sh", "-c", "printf '%s' 'a) S (b' > /proc/$$/comm; echo; read _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        found = processes.read(shell.pid)
        assert found is not None
        assert found.ppid == os.getpid()
        shell.communicate(b"\n")


def test_an_environment_is_the_one_the_process_started_with() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"TAG": "a=b"}) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"it runs\n")
        child.stdin.flush()
        child.stdout.readline()  # Until then it may still be on its way from fork to exec.
        assert processes.environment(child.pid) == {"TAG": "a=b"}
        child.communicate()
    assert processes.environment(child.pid) == {}

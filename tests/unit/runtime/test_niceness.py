"""The niceness of those who watch the training."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, threading
from elastic.runtime.niceness import raise_priority
os.setpriority(os.PRIO_PROCESS, 0, 15)
ended, begun = threading.Event(), threading.Event()
found = []
def other():
    begun.set()
    ended.wait(20)
    found.append(os.getpriority(os.PRIO_PROCESS, 0))
thread = threading.Thread(target=other)
thread.start()
begun.wait(20)
if {refused}:
    os.setpriority = lambda *_: (_ for _ in ()).throw(PermissionError("no"))
print(raise_priority(), os.getpriority(os.PRIO_PROCESS, 0), end=" ")
ended.set()
thread.join()
print(*found)
"""


def told(refused: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(refused=refused)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lower its niceness")
def test_every_thread_has_the_usual_priority_again() -> None:
    assert told(refused=False) == "True 0 0"


def test_where_it_is_refused_everything_stays_as_it_is() -> None:
    assert told(refused=True) == "False 15 15"

"""The reason that native code prints before it ends a process. Real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.runtime.node.last_words import LastWords

GLOO = (
    "[E 553] logging.cc:118: Unhandled exception: N4gloo13EnforceNotMetE. what(): [enforce fail at /w/tcp/pair.cc:456] "
    "131072 vs 32768. Is there a distributed collective mismatch in your code? /x/ray/_raylet.so(+0x18) [0x7fe] ray::"
)
MISMATCH = (
    "[enforce fail at /w/tcp/pair.cc:456] 131072 vs 32768. Is there a distributed collective mismatch in your code?"
)
ABORTS = "import faulthandler, os, sys; faulthandler.enable(); "


def said(output: Any, ends: str) -> str:
    """By a process that waits until it is known, and ends then."""
    command = [sys.executable, "-c", f"input(); {ends}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True)
    words = LastWords(process.pid)
    process.communicate("go\n")
    return asyncio.run(words.read())


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (f"{ABORTS}print({GLOO!r}, file=sys.stderr, flush=True); os.abort()", MISMATCH),
        (f"{ABORTS}os.abort()", "Fatal Python error: Aborted"),
        (f"{ABORTS}faulthandler._sigsegv()", "Fatal Python error: Segmentation fault"),
        ("import os; os.kill(os.getpid(), 9)", ""),
        (f"{ABORTS}print('x' * 400_000, file=sys.stderr); os.abort()", "Fatal Python error: Aborted"),
    ],
)
def test_the_line_that_says_why(tmp_path: Path, ends: str, told: str) -> None:
    path = tmp_path / "worker-0001.log"
    path.write_text("what(): of the process before\n")
    with path.open("a") as output:
        assert said(output, ends) == told


def test_a_pipe_is_read_by_others() -> None:
    assert said(subprocess.PIPE, f"{ABORTS}os.abort()") == ""


def test_a_process_that_has_gone_says_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert asyncio.run(LastWords(process.pid).read()) == ""

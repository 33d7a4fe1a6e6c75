"""Nobody waits for a compilation whose process was killed, and no two compile in one folder."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from elastic.engines.build_lock import BuildLock, install

LIMIT_S = 30.0
# Says when it holds the lock, and holds it until it is killed.
HOLDER = """
import os, sys
from {module} import {name}
{name}(os.path.join(sys.argv[1], "lock")).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path, module: str, name: str) -> subprocess.Popen[str]:
    code = HOLDER.format(module=module, name=name)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def taken(folder: Path) -> tuple[threading.Thread, threading.Event]:
    """A thread that wants to build in `folder`, and whether it may."""
    done = threading.Event()

    def build() -> None:
        lock = BuildLock(str(folder / "lock"), 0.001)
        assert lock.try_acquire()
        done.set()
        lock.release()

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    return thread, done


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("module", "name"), [("torch.utils.file_baton", "FileBaton"), ("elastic.engines.build_lock", "BuildLock")]
)
def test_a_process_that_is_killed_while_it_compiles_leaves_no_lock(tmp_path: Path, module: str, name: str) -> None:
    end(holder(tmp_path, module, name))
    assert not FileBaton(str(tmp_path / "lock")).try_acquire(), "torch's own would wait without limit"
    thread, done = taken(tmp_path)
    assert done.wait(LIMIT_S)
    thread.join(LIMIT_S)
    assert not (tmp_path / "lock").exists(), "processes with torch's own lock wait no longer either"


def test_two_processes_do_not_compile_in_one_folder(tmp_path: Path) -> None:
    first = holder(tmp_path, "elastic.engines.build_lock", "BuildLock")
    thread, done = taken(tmp_path)
    try:
        assert not BuildLock(str(tmp_path / "lock")).taken()
        assert not done.is_set()
    finally:
        end(first)
    assert done.wait(LIMIT_S)
    thread.join(LIMIT_S)


def test_a_compiler_whose_owner_was_killed_is_waited_for(tmp_path: Path) -> None:
    compiler = subprocess.Popen(["cat"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert not BuildLock(str(tmp_path / "lock")).taken()
        _, done = taken(tmp_path)
    finally:
        compiler.communicate(timeout=LIMIT_S)
    assert done.wait(LIMIT_S)


def test_torch_uses_it_for_its_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton)
    install()
    assert cpp_extension.FileBaton is BuildLock


def test_an_operator_is_built_where_a_killed_process_left_torchs_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton)
    install()
    build, source = tmp_path / "build", tmp_path / "empty.cpp"
    build.mkdir()
    source.write_text('extern "C" int answer() { return 42; }\n', encoding="utf-8")
    end(holder(build, "torch.utils.file_baton", "FileBaton"))
    cpp_extension.load("empty", [str(source)], build_directory=str(build), is_python_module=False, with_cuda=False)
    assert ctypes.CDLL(str(build / "empty.so")).answer() == 42


ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc"),
]
BUILD_LIMIT_S = 400.0


@pytest.mark.timeout(2 * BUILD_LIMIT_S)
@pytest.mark.parametrize(
    "operator",
    [
        "small",
        # Expected: some ten seconds of a C++ compiler, and about a minute of nvcc.
        pytest.param("CPUAdam", marks=pytest.mark.slow),
        pytest.param("FusedAdam", marks=ON_DEVICE),
    ],
)
def test_nobody_waits_for_a_builder_that_was_killed_in_the_middle(operator: str, tmp_path: Path) -> None:
    what = operator
    if operator == "small":
        what = str(tmp_path / "small.cpp")
        # Long enough for the compiler to be killed in.
        lines = [f"template struct std::array<int, {number}>;" for number in range(1, 40)]
        Path(what).write_text("#include <array>\n#include <map>\n" + "\n".join(lines), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("builds.py")), str(tmp_path / "builds"), what]
    (tmp_path / "builds").mkdir()
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((tmp_path / "builds").rglob("lock.flock")), killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(LIMIT_S)
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["built"]), done.stderr[-4000:]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """While the process runs."""
    while not condition():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
            raise AssertionError(f"it ended with {process.returncode}")

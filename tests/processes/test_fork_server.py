"""The process that forks a node's workers: what a forked process has, what it does not, and how the server ends."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.core.settings import RunSettings
from elastic.runtime.node.fork_server import ForkServer, started_with

LIMIT_S = 300.0
# That of a process of Ray's, as the server has it; pytest has set variables since.
ENVIRONMENT = started_with()
# In place of Ray's script of a worker process.
WORKER = """
import json, os, sys
imported = len(sys.modules), "torch" in sys.modules, "deepspeed" in sys.modules
import logging, random, numpy, torch
from deepspeed.accelerator import get_accelerator
told = {
    "imported": imported, "arguments": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "environment": dict(os.environ), "parent": os.getppid(), "niceness": os.nice(0), "folder": os.getcwd(),
    "own_group": os.getpgid(0) == os.getpid(), "draws": [random.random(), float(numpy.random.rand())],
    "threads": torch.get_num_threads(), "sum": float(torch.ones(1 << 20).sum() + (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0]),
    "accelerator": get_accelerator().device_name(), "root_handlers": len(logging.root.handlers),
    "descriptors": {int(n): os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")},
    "child": os.waitstatus_to_exitcode(os.waitpid(os.spawnlp(os.P_NOWAIT, "true", "true"), 0)[1]),
}
print("printed", flush=True)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(told, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
if "--wait" in sys.argv:
    sys.stdin.read()
sys.exit(3)
"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("forks")
    (made / "worker.py").write_text(WORKER)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ForkServer]:
    made = start(folder)
    await_imports(made)
    yield made
    end(made)


def start(folder: Path, runtime_env: Mapping[str, object] | None = None) -> ForkServer:
    settings = RunSettings("run", resources_per_worker={"CPU": 2.0}, storage_url=str(folder))
    return ForkServer(str(folder), settings, runtime_env or {}, {"HANDED": "secret"}, 15)


def await_imports(server: ForkServer) -> None:
    """A launcher waits 30 s for them, which a busy machine may exceed. A request of nothing is answered after them."""
    address = shlex.split(server.command)[-1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(address)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def end(server: ForkServer) -> None:
    assert server.process is not None
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.wait(LIMIT_S)


def launch(
    server: ForkServer, folder: Path, name: str, *options: str, environment: Mapping[str, str] = ENVIRONMENT
) -> dict[str, Any]:
    """What the worker process tells; it is started as Ray would start it."""
    command = [*shlex.split(server.command), str(folder / "worker.py"), str(folder / name), *options]
    with (folder / f"{name}.out").open("wb") as out:
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if options == ("--wait",) else subprocess.DEVNULL,
            stdout=out,
            env=environment,
            process_group=0,
        )
    launcher.wait(LIMIT_S)
    told = folder / name
    wait_for(told.exists, f"{told} of {command}")
    found: dict[str, Any] = json.loads(told.read_text())
    return {**found, "launcher": launcher}


def wait_for(condition: Any, awaited: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {awaited}"
        time.sleep(0.01)


def test_a_forked_process_is_the_one_that_was_started_but_has_imported(server: ForkServer, folder: Path) -> None:
    assert server.process is not None
    one, two = (launch(server, folder, name, "--option") for name in ("one", "two"))
    for told, name in ((one, "one"), (two, "two")):
        assert told["parent"] == server.process.pid
        assert told["launcher"].returncode == 0
        assert told["imported"][1:] == [True, True]
        assert told["arguments"] == [str(folder / "worker.py"), str(folder / name), "--option"]
        assert told["path"][0] == str(folder.resolve())
        assert (told["name"], told["file"]) == ("__main__", str(folder / "worker.py"))
        assert told["environment"] == ENVIRONMENT
        assert told["folder"] == os.getcwd()
        assert told["own_group"]
        assert told["niceness"] >= 15
        # What a worker of two CPUs would have read, which Ray says in each process before it imports.
        assert told["threads"] == int(ENVIRONMENT.get("OMP_NUM_THREADS", 2))
        assert told["sum"] == float(1 << 20) + 300.0
        assert told["accelerator"] == "cpu"
        assert told["root_handlers"] == 0
        assert told["child"] == 0
        # No descriptor of the server's; the last one is of the listing itself.
        assert len(told["descriptors"]) <= 4, told["descriptors"]
        assert told["descriptors"]["1"] == str(folder / f"{name}.out")
        assert (folder / f"{name}.out").read_text() == "printed\n"
    assert set(one["draws"]).isdisjoint(two["draws"])


def test_a_process_that_is_started_differently_imports_by_itself(server: ForkServer, folder: Path) -> None:
    assert server.process is not None
    told = launch(server, folder, "different", environment={**ENVIRONMENT, "NCCL_DEBUG": "INFO"})
    assert told["parent"] == os.getpid()
    assert told["imported"][1:] == [False, False]
    assert told["launcher"].returncode == 3
    assert told["environment"]["NCCL_DEBUG"] == "INFO"


def test_workers_outlive_a_killed_server_and_later_ones_import_by_themselves(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    server = start(tmp_path)
    assert server.process is not None
    await_imports(server)
    early = launch(server, tmp_path, "early", "--wait")
    server.process.send_signal(signal.SIGKILL)
    end(server)
    late = launch(server, tmp_path, "late")
    assert late["imported"][1:] == [False, False]
    assert late["launcher"].returncode == 3
    out = tmp_path / "early.out"
    assert out.read_text() == "printed\n"
    # It still waits for its standard input, which this process has in its hands.
    early["launcher"].stdin.close()


def test_the_server_ends_with_its_owner(tmp_path: Path) -> None:
    """Also while it imports."""
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "import test_fork_server as t; s = t.start(Path(sys.argv[1])); print(s.process.pid, flush=True);"
        "sys.stdin.read()"
    )
    here = str(Path(__file__).parent)
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), here], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    handle = os.pidfd_open(int(owner.stdout.readline()))
    owner.kill()
    owner.communicate(timeout=LIMIT_S)
    ended, _, _ = select.select([handle], [], [], LIMIT_S)
    os.close(handle)
    assert ended == [handle]


@pytest.mark.parametrize("key", ["py_executable", "container", "image_uri"])
def test_an_environment_with_a_python_of_its_own_has_no_server(tmp_path: Path, key: str) -> None:
    made = start(tmp_path, {key: "uv run", "env_vars": {}})
    assert (made.command, made.process) == ("", None)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "threads were started",
        ),
        ("import torch; torch.cuda.is_initialized = lambda: True", "a device was initialised"),
    ],
)
def test_a_process_that_cannot_be_forked_is_none(tmp_path: Path, module: str, why: str) -> None:
    """With a module that is imported with the others."""
    code = (
        "import sys, json; from elastic.runtime.worker import fork_main, preload;"
        "preload.preload = lambda *a: exec(sys.argv[1]);"
        "print(fork_main.prepare({'environment': {}, 'handed': {}, 'niceness': 0, 'search_path': [],"
        " 'engine': 'deepspeed', 'snapshots': True}))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, module],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        check=True,
    )
    assert why in done.stdout

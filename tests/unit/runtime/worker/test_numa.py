"""Which cores are near a device, by a tree as the kernel's; and that a process and what it starts stay on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.runtime.worker.numa import Sysfs, core_list, cores_near, sysfs_address

LIMIT_S = 60.0
ALL = frozenset(range(16))


def tree(root: Path, nodes: dict[int, str], devices: dict[str, int], siblings: dict[int, str] | None = None) -> Sysfs:
    """`nodes`: their cores. `devices`: NVIDIA GPUs and their NUMA node."""

    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n", encoding="ascii")

    write("devices/system/node/online", ",".join(map(str, nodes)))
    for node, cores in nodes.items():
        write(f"devices/system/node/node{node}/cpulist", cores)
    for core, threads in (siblings or {}).items():
        write(f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", threads)
    for device, node in devices.items():
        for name, text in (("numa_node", str(node)), ("vendor", "0x10de"), ("class", "0x030200")):
            write(f"bus/pci/devices/{device}/{name}", text)
    return Sysfs(root)


# Two sockets of four physical cores with two threads each.
SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
THREADS = {core: f"{core % 8},{core % 8 + 8}" for core in range(16)}
GPUS = {"0000:3b:00.0": 0, "0000:5e:00.0": 0, "0000:86:00.0": 1, "0000:af:00.0": 1, "0000:d8:00.0": 1}


def test_a_worker_gets_the_cores_of_its_devices_node_that_it_may_use(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, SOCKETS, GPUS)
    assert cores_near("0000:3b:00.0", "node", ALL, sysfs) == core_list("0-3,8-11")
    assert cores_near("0000:86:00.0", "node", ALL, sysfs) == core_list("4-7,12-15")
    # A container's cores.
    assert cores_near("0000:86:00.0", "node", core_list("0-5"), sysfs) == {4, 5}


def test_exclusive_cores_are_dealt_out_once_and_by_whole_physical_cores(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, SOCKETS, GPUS, THREADS)
    # No GPU: a network card of another maker, and NVIDIA's sound device beside the GPU.
    for name, text in (("numa_node", "1"), ("vendor", "0x10de"), ("class", "0x040300")):
        path = tmp_path / "bus/pci/devices/0000:86:00.1" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="ascii")
    dealt = {device: cores_near(device, "exclusive", ALL, sysfs) for device in GPUS}
    assert dealt == {
        "0000:3b:00.0": {0, 1, 8, 9}, "0000:5e:00.0": {2, 3, 10, 11},
        "0000:86:00.0": {4, 5, 12, 13}, "0000:af:00.0": {6, 14}, "0000:d8:00.0": {7, 15},
    }  # fmt: skip


def test_a_machine_with_one_node_needs_no_word_of_the_kernel(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, {0: "0-15"}, {"0000:3b:00.0": -1})
    assert cores_near("0000:3b:00.0", "node", ALL, sysfs) == ALL


@pytest.mark.parametrize(
    ("node", "allowed", "binding", "words"),
    [
        (-1, ALL, "node", "does not tell which NUMA node 0000:3b:00.0 belongs to"),
        (0, core_list("4-7"), "node", "none of the cores of its NUMA node 0"),
        (0, core_list("0"), "exclusive", "the 1 cores of its NUMA node 0 cannot be dealt out to 2 GPUs"),
    ],
)
def test_what_cannot_be_bound_is_named(
    node: int, allowed: frozenset[int], binding: str, words: str, tmp_path: Path
) -> None:
    sysfs = tree(tmp_path, SOCKETS, {"0000:3b:00.0": node, "0000:5e:00.0": node}, THREADS)
    with pytest.raises(RuntimeError, match=words):
        cores_near("0000:3b:00.0", binding, allowed, sysfs)  # type: ignore[arg-type]


def test_nvmls_form_of_an_address_is_not_sysfs_form() -> None:
    assert sysfs_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert sysfs_address("0001:AF:00.0") == "0001:af:00.0"


BINDS = """
import json, os, sys, threading, time
from pathlib import Path
from elastic.runtime.worker.numa import Sysfs, bind_near
told, go = {}, threading.Event()
def older():
    go.wait()
    told["older thread"] = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=older)
thread.start()
told["returned"] = sorted(bind_near("0000:3b:00.0", "node", Sysfs(Path(sys.argv[1]))))
go.set()
thread.join()
told["main thread"] = sorted(os.sched_getaffinity(0))
newer = threading.Thread(target=lambda: told.update({"newer thread": sorted(os.sched_getaffinity(0))}))
newer.start()
newer.join()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, json.dumps(sorted(os.sched_getaffinity(0))).encode())
    os._exit(0)
told["data worker"] = json.loads(os.read(reader, 1000))
print(json.dumps(told))
"""


def test_a_process_its_threads_and_its_data_workers_stay_on_these_cores(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one core")
    near, far = mine[-1], mine[0]
    tree(tmp_path, {0: str(far), 1: str(near)}, {"0000:3b:00.0": 1})
    done = subprocess.run(
        [sys.executable, "-c", BINDS, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"returned", "older thread", "main thread", "newer thread", "data worker"}
    assert {tuple(cores) for cores in told.values()} == {(near,)}

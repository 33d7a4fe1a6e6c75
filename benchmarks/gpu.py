"""One CUDA device and no Ray: what snapshots, saves, rebuilds and restores cost there. `python -m benchmarks.gpu`.

A model of a billion parameters in bf16 with ZeRO-1; `--fill` one of three billion, which leaves no room on a device of
80 GB, without what does not depend on it; `--small` is the same as without it with a tiny model, on whatever device
there is. The snapshots lie in the memory of a process next to this one, as they do in a run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from benchmarks import device, machine, table
from benchmarks.figures import Figure, Target, ratio
from benchmarks.marks import changes, read_marks
from benchmarks.workload import BILLION, THREE_BILLION, TINY, Size

CASE, STAGE = "gpu", 1
PLAIN, SNAPSHOTS = "without snapshots", "a snapshot at every step"


@dataclass(frozen=True)
class Amount:
    """How much is measured. `turns` of `steps` steps each, with and without snapshots; `rebuilds` in one process, and
    `groups` made and aborted. 0 bytes and 0 groups: only what depends on the model."""

    size: Size
    turns: int
    steps: int
    saves: int
    rebuilds: int
    segment_bytes: int = 0
    groups: int = 0


FULL = Amount(BILLION, turns=4, steps=8, saves=2, rebuilds=20, segment_bytes=12 << 30, groups=20)
SMALL = Amount(TINY, turns=2, steps=4, saves=2, rebuilds=4, segment_bytes=16 << 20, groups=3)
FILL = Amount(THREE_BILLION, turns=2, steps=6, saves=0, rebuilds=3)


def measure(amount: Amount, folder: Path) -> list[Figure]:
    """Everything below `folder`, which must exist and be empty. DeepSpeed's device is chosen before this is called."""
    from benchmarks.alone import MemoryNode

    numbers = count(1)
    with MemoryNode() as node:
        figures = _steps(amount, folder, node, numbers)
    with MemoryNode() as node:
        figures += _rebuilds(amount, folder, node, numbers)
    with MemoryNode() as node:
        figures += _leaving(amount, folder, node, numbers)
    if amount.saves:
        figures += _saves(amount, folder, numbers)
    if amount.segment_bytes:
        figures += _pinning(amount.segment_bytes) + device.transfers(amount.segment_bytes)
        figures += device.begun_behind_a_kernel(amount.segment_bytes // 16) + device.groups(amount.groups)
    return figures


def _config(amount: Amount, marks: Path) -> dict[str, Any]:
    marks.mkdir(exist_ok=True)
    return {"size": amount.size.name, "stage": STAGE, "bf16": True, "marks": str(marks)}


# -- steps and snapshots ----------------------------------------------------------------------------------------------


def _steps(amount: Amount, folder: Path, node: Any, numbers: Any) -> list[Figure]:
    """Turn by turn with and without snapshots, from the end of a step to the end of the next: whatever delays one is in
    it, on the host or on the device. The first two steps of a generation warm up and do not count."""
    from benchmarks.alone import live
    from benchmarks.workload import train

    seconds: dict[str, list[float]] = {PLAIN: [], SNAPSHOTS: []}
    stalls: list[float] = []
    told: list[float] = []
    config = _config(amount, folder / "steps")
    for _ in range(amount.turns):
        for name, used in ((PLAIN, None), (SNAPSHOTS, node)):
            number = next(numbers)
            lived = live(number, train, config, folder, end_at=amount.steps, node=used)
            ends = [mark.at for mark in read_marks(folder / "steps") if mark.era == number]
            walls = [later - before for before, later in pairwise(ends[1:])]
            seconds[name] += walls
            told += [report.duration_s / wall for report, wall in zip(lived.steps[2:], walls, strict=True)]
            stalls += [report.save_stall_s for report in lived.steps[2:]] if used else []
    without, with_them = (Figure(CASE, f"step, {name}", "s", tuple(found)) for name, found in seconds.items())
    return [
        without, with_them, ratio(CASE, "step with snapshots over step without", with_them, without),
        # A step that ends before the device has done it is reported as a fraction of what it takes.
        Figure(CASE, "reported duration of a step over the time to the end of the next", "x", tuple(told)),
        Figure(CASE, "training thread, or its stream, kept by a snapshot", "s", tuple(stalls)),
    ]  # fmt: skip


# -- rebuilds and restores --------------------------------------------------------------------------------------------


def _rebuilds(amount: Amount, folder: Path, node: Any, numbers: Any) -> list[Figure]:
    """Generations one after the other in this process, each from the last one's snapshot, two steps each."""
    from benchmarks.alone import live
    from benchmarks.workload import train

    config = _config(amount, folder / "rebuilds")
    used, reserved, restores = [], [], []
    for turn in range(amount.rebuilds + 1):
        lived = live(next(numbers), train, config, folder, end_at=2 * turn + 2, node=node, restore=turn > 0)
        restores += lived.restores
        used.append(_memory_bytes())
        reserved.append(_reserved_bytes())
    seconds = [change.seconds for change in changes(read_marks(folder / "rebuilds"))]
    # The first generations fill caches that the process keeps.
    settled = len(used) // 2
    grown = (used[-1] - used[settled]) / 1e6
    return [
        Figure(CASE, "rebuild in the process: last step to next step", "s", tuple(seconds)),
        Figure(CASE, f"{_where()} memory grown over the last {len(used) - 1 - settled} rebuilds", "MB", (grown,),
               details={"bytes": used, "reserved_bytes": reserved},
               targets=(Target("max", 1.0),) if _cuda() else ()),
        Figure(CASE, f"{_where()} memory reserved by the allocator, grown as often", "MB",
               ((reserved[-1] - reserved[settled]) / 1e6,), targets=(Target("max", 64.0),) if _cuda() else ()),
        *_bandwidth(restores),
    ]  # fmt: skip


def _bandwidth(restores: Sequence[Any]) -> list[Figure]:
    size = restores[-1].bytes_needed
    limit = Figure(CASE, f"copy of as many bytes from host to {_where()}", "GB/s",
                   tuple(size / seconds / 1e9 for seconds in _copy_in(size)))  # fmt: skip
    reached = [report.bytes_needed / (report.read_s + report.install_s) / 1e9 for report in restores]
    restore = Figure(CASE, "restore from memory, reading and installing", "GB/s", tuple(reached),
                     notes=(f"{size / 1e6:.1f} MB per restore",))  # fmt: skip
    verified = Figure(CASE, "verification of the restored state", "s", tuple(report.verify_s for report in restores))
    return [restore, limit, ratio(CASE, "restore over that copy", restore, limit), verified]


def _copy_in(size: int, repetitions: int = 5) -> list[float]:
    """Seconds to bring `size` bytes of (pinned) host memory to the device; on a CPU, from memory to memory."""
    import torch

    if not _cuda():
        return machine.copy_seconds(size, repetitions)
    # In pieces: the whole may be more than one allocation of pinned memory should be.
    piece = min(size, 1 << 30)
    source = torch.ones(piece, dtype=torch.uint8).pin_memory()
    target = torch.empty(piece, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) * size / piece)
    return seconds


def _memory_bytes() -> int:
    """Of the device; without one, of this process."""
    import torch

    gc.collect()
    if _cuda():
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reserved_bytes() -> int:
    """What torch's allocator holds of the device, fragments included; without a device, `_memory_bytes`."""
    import torch

    return int(torch.cuda.memory_reserved()) if _cuda() else _memory_bytes()


# -- the end of a generation ------------------------------------------------------------------------------------------


def _leaving(amount: Amount, folder: Path, node: Any, numbers: Any, repetitions: int = 3) -> list[Figure]:
    """From an abort, while the copies of a snapshot are under way, to the end of everything that the generation had."""
    from benchmarks.alone import live
    from benchmarks.workload import train
    from elastic.core.settings import GPU_FAILURES

    seconds: list[float] = []
    for _ in range(repetitions):
        runners: list[Any] = []
        begun: list[float] = []

        def abort(step: int, runners: list[Any] = runners, begun: list[float] = begun) -> None:
            """Before the pass that follows step 2, whose snapshot has just begun."""
            if step == 2 and not begun:
                begun.append(time.perf_counter())
                threading.Thread(target=runners[0].abort, args=("it is measured",)).start()

        config = {**_config(amount, folder / "leaving"), "before_pass": abort}
        live(next(numbers), train, config, folder, end_at=2, node=node, aborted=runners.append)
        seconds.append(time.perf_counter() - begun[0])
    limit = (Target("max", GPU_FAILURES["abort_timeout_s"]),) if _cuda() else ()
    return [Figure(CASE, "leaving a generation, a snapshot under way", "s", tuple(seconds), targets=limit)]


# -- memory of the node -----------------------------------------------------------------------------------------------


def _pinning(nbytes: int, repetitions: int = 3) -> list[Figure]:
    """What a generation is spared that writes into the segments of the last one; and the same for memory of malloc,
    which the driver may refuse or be slower with."""
    from elastic.checkpoint.memory.segments import Segment, map_segment
    from elastic.training.state.pins import pinning

    pin = pinning("deepspeed")
    seconds: dict[str, list[float]] = {
        "map and pin a segment": [], "unpin and unmap it": [], "pin memory of malloc": [], "unpin it": [],
    }  # fmt: skip
    for _ in range(repetitions):
        segment = Segment(nbytes)
        while segment.rough:
            segment.populate()
        begun = time.perf_counter()
        mapped = map_segment(segment.fd, nbytes)
        unpin = pin(memoryview(mapped))
        done = time.perf_counter()
        unpin()
        del unpin
        mapped.close()
        seconds["map and pin a segment"].append(done - begun)
        seconds["unpin and unmap it"].append(time.perf_counter() - done)
        segment.close()
        pinned_s, unpinned_s = _malloc(nbytes, pin)
        seconds["pin memory of malloc"].append(pinned_s)
        seconds["unpin it"].append(unpinned_s)
    notes = (f"{nbytes / 1e9:.2f} GB",)
    return [Figure(CASE, name, "s", tuple(values), notes=notes) for name, values in seconds.items()]


def _malloc(nbytes: int, pin: Callable[[memoryview], Callable[[], None]]) -> tuple[float, float]:
    """Seconds to pin and to unpin memory that is there already: without the time that pages take to come."""
    import torch

    memory = torch.zeros(nbytes, dtype=torch.uint8)
    memory.fill_(1)
    begun = time.perf_counter()
    unpin = pin(memory.numpy().data)
    pinned = time.perf_counter()
    unpin()
    return pinned - begun, time.perf_counter() - pinned


# -- durable saves ----------------------------------------------------------------------------------------------------


def _saves(amount: Amount, folder: Path, numbers: Any) -> list[Figure]:
    """How long DeepSpeed's own save and DCP's async_save keep the training, with the same state."""
    from benchmarks.alone import live

    found: dict[str, list[float]] = {"engine.save_checkpoint": [], "torch DCP async_save": []}

    def train_and_save(config: dict[str, Any]) -> None:
        from benchmarks import workload

        workload.train({**config, "after_step": save})

    def save(engine: Any, step: int) -> None:
        if step <= 2:
            return
        _timed(found["engine.save_checkpoint"], lambda: engine.deepspeed.save_checkpoint(str(folder / f"ds-{step}")))
        written = _timed(found["torch DCP async_save"], lambda: _dcp_save(engine.deepspeed, folder / f"dcp-{step}"))
        written.result()
        for name in (f"ds-{step}", f"dcp-{step}"):
            shutil.rmtree(folder / name)

    live(next(numbers), train_and_save, _config(amount, folder / "saves"), folder, end_at=2 + amount.saves)
    return [Figure(CASE, "training kept by a durable save", "s", tuple(times), name) for name, times in found.items()]


def _timed(seconds: list[float], do: Any) -> Any:
    import torch

    if _cuda():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    result = do()
    seconds.append(time.perf_counter() - begun)
    return result


def _dcp_save(engine: Any, target: Path) -> Any:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import async_save

    from benchmarks.bodies.state_worker import own_state

    group: Any = torch.distributed.new_group(backend="gloo")
    return async_save({"rank0": own_state(engine)}, checkpoint_id=str(target), process_group=group)


# -- the command ------------------------------------------------------------------------------------------------------


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available()) and os.environ.get("DS_ACCELERATOR") != "cpu"


def _where() -> str:
    return "device" if _cuda() else "process"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model, also on a CPU: figures are no use")
    parser.add_argument("--fill", action="store_true", help="a model that fills a device of 80 GB")
    parser.add_argument("--out", type=Path, help="a JSON file")
    asked = parser.parse_args(arguments)
    from elastic.comm.allocator import let_segments_grow

    let_segments_grow()
    import torch

    if not torch.cuda.is_available():
        if not asked.small:
            sys.stderr.write("there is no CUDA device here; --small runs on the CPU\n")
            return 2
        os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    amount = SMALL if asked.small else FILL if asked.fill else FULL
    folder = Path(tempfile.mkdtemp(prefix="benchmark-gpu-"))
    about: dict[str, Any] = {
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name() if _cuda() else "CPU",
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }
    before = machine.load()
    try:
        figures = measure(amount, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table.show(figures, about["machine"])
    if asked.out is not None:
        told = {**about, "before": before, "after": machine.load(), "figures": [figure.to_json() for figure in figures]}
        asked.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What only a device can show, with the values that are expected; skipped with the reason where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, HashStore

from elastic.checkpoint.digest import digest, digest_on_device
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.checkpoint.source import ReadRange
from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.device_check import device_error
from elastic.comm.device_meters import EnergyMeter
from elastic.comm.device_stream import DelayClock
from elastic.comm.nccl import first_error, outlive_peers
from elastic.comm.nvml import NvmlDevice
from elastic.core.checkpoint.manifest import ShardRecord, StoredTensor
from elastic.core.names import shard_file
from elastic.core.policy.device_health import unfit
from elastic.core.sharding.layout import Chunk
from elastic.runtime.worker.numa import sysfs_address
from elastic.training.state import reading
from elastic.training.state.copier import Copier
from elastic.training.state.host import HostCopy, HostPool
from elastic.training.state.pins import pinning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LIMIT_S = 120.0
ASSERTS = """
import os, sys, time
os.environ.update({environment})
import torch, torch.distributed as dist
from torch._C._distributed_c10d import HashStore
dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
try:
    torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")].cpu()
except RuntimeError as error:
    print("raised", getattr(error, "error_code", None), flush=True)
# Longer than the watchdog's interval: this is when it would end the process.
time.sleep(3.0)
print("alive", flush=True)
os._exit(0)
"""


def test_the_machine_is_as_the_other_tests_take_it_to_be() -> None:
    """Torch is a CUDA build with an NCCL that makes communicators in the background and with several roots."""
    assert torch.version.cuda is not None
    assert torch.cuda.nccl.version() >= (2, 23)
    assert subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0


def test_the_allocators_segments_grow() -> None:
    code = (
        "from elastic.comm.allocator import let_segments_grow\nimport torch\nlet_segments_grow()\n"
        "kept = torch.ones(1 << 20, device='cuda')\n"
        "print({segment['is_expandable'] for segment in torch.cuda.memory_snapshot()})"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout.split() == ["{True}"], done.stderr[-2000:]


def asserts(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = ASSERTS.format(environment=environment)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_device_assert_is_an_exception_and_not_the_end_of_the_process() -> None:
    """Gone with TORCH_NCCL_RETHROW_CUDA_ERRORS at its default: exit code -6."""
    done = asserts({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"})
    assert (done.returncode, done.stdout.split()) == (0, ["raised", "710", "alive"]), done.stderr[-2000:]


def test_torchs_own_default_ends_the_process_with_a_device_assert() -> None:
    """What the settings are for. Where this fails, torch has another default, and they may be needless."""
    done = asserts({"TORCH_NCCL_ENABLE_MONITORING": "0"})
    assert (done.returncode, done.stdout.split()) == (-6, ["raised", "710"]), done.stderr[-2000:]


def test_a_device_assert_is_told_from_broken_hardware() -> None:
    code = (
        "import torch\nfrom elastic.comm.device_check import device_error\n"
        "from elastic.comm.failures import is_of_device, is_of_hardware\n"
        "try:\n    torch.zeros(2, device='cuda')[torch.tensor([7], device='cuda')].cpu()\n"
        "except RuntimeError as error:\n    print(is_of_device(error), is_of_hardware(error))\n"
        "later = device_error(torch.device('cuda'))\nprint(later is not None and later.error_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout.split() == ["True", "False", "710"], done.stderr[-2000:]
    assert device_error(torch.device("cuda")) is None, "this process has its own context"


@pytest.fixture
def nccl() -> Iterator[dist.ProcessGroup]:
    outlive_peers()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_nccl_and_gloo_groups_are_asked_side_by_side(nccl: dist.ProcessGroup) -> None:
    backend = nccl._get_backend(torch.device("cuda", 0))
    # As `Communicators` does it for groups of several ranks.
    assert not backend._is_initialized()
    backend.eager_connect_single_device(torch.device("cuda", 0))
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    assert backend._is_initialized()
    gloo = dist.new_group(backend="gloo")
    assert backend.get_error() == ErrorType.SUCCESS, "a backend without it would be passed over"
    assert first_error([nccl, gloo]) is None


def test_groups_that_are_made_and_aborted_again_and_again_leave_no_device_memory() -> None:
    outlive_peers()
    torch.cuda.set_device(0)
    free = []
    for _ in range(20):
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cuda"))
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()
        dist.destroy_process_group()
        free.append(torch.cuda.mem_get_info()[0])
    # The first groups fill NCCL's own caches.
    assert free[-1] >= free[4] - (16 << 20), free


def test_the_device_and_the_host_compute_one_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(1_000_003, device="cuda").to(dtype)
        assert digest_on_device(tensor[5:], "k/n", 5) == digest(tensor[5:].cpu(), "k/n", 5)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_snapshot_neither_waits_for_the_training_nor_is_overtaken_by_it(at_once: bool) -> None:
    device = torch.device("cuda", 0)
    source, pool, copier = torch.ones(64 << 20, device=device), HostPool(device), Copier(device)
    pool.copy([HostCopy("a", source)])
    # About a second of work on the stream of the training.
    torch.cuda._sleep(2_000_000_000)
    work = torch.cuda.current_stream().record_event()
    found, copies = pool.prepare([HostCopy("a", source, at_once=at_once)])
    copier.start(copies, lambda: None)
    copier.fence()
    source.add_(1.0)
    assert not work.query(), "the training thread has waited for the device"
    assert copier.drain(LIMIT_S)
    assert found["a"].min() == found["a"].max() == 1.0
    copier.close()
    pool.close()


def test_an_update_that_waits_for_copies_on_the_device_is_a_stall() -> None:
    """Copies that begin about a second late: the thread is back at once, and the stall is read when the step ends."""
    device = torch.device("cuda", 0)
    pool, copier, clock = HostPool(device), Copier(device), DelayClock(device)
    source = torch.ones(1 << 20, device=device)
    _, copies = pool.prepare([HostCopy("a", source)])
    assert copier._stream is not None
    with copier._stream.used():
        torch.cuda._sleep(2_000_000_000)
    copier.start(copies, lambda: None)
    with clock.delay():
        copier.fence()
    source.add_(1.0)
    assert clock.take() == 0.0, "the training thread has waited for the device"
    # As reading the loss does.
    source.sum().item()
    assert 0.3 < clock.take() < 10.0
    copier.close()
    pool.close()


def test_the_nodes_memory_is_registered_once_for_many_generations() -> None:
    """12 GB take seconds to register, on the training thread: two segments, however many generations use them."""
    device, token = torch.device("cuda", 0), bytes(32)
    record, registered = shard(), []
    with closing(SnapshotServer(token, "127.0.0.1")) as node:
        pin = pinning("fsdp2")

        def counted(memory: memoryview) -> Callable[[], None]:
            registered.append(len(memory))
            return pin(memory)

        with closing(SnapshotClient(node.local_name, token, counted)) as memory:
            for generation in range(1, 5):
                base = (generation - 1, 2 * generation - 2) if generation > 1 else None
                memory.open(replace(record, generation=generation), record.bytes, [], base=base)
                for step in (2 * generation - 1, 2 * generation):
                    target = torch.frombuffer(memory.segment(), dtype=torch.uint8)
                    assert target.is_pinned(), "copies into it would wait for the device"
                    target.copy_(torch.full((record.bytes,), step, dtype=torch.uint8, device=device), non_blocking=True)
                    torch.cuda.synchronize()
                    memory.commit(step, {})
                    assert memory.wait_complete(step, LIMIT_S)
                    memory.settled(step)
    assert registered == [record.bytes] * 2


def shard() -> ShardRecord:
    """64 MiB of one tensor."""
    numel = 16 << 20
    return ShardRecord(
        rank=0, world_size=1, generation=1, step=0, file=shard_file(0, 1), bytes=4 * numel, xxh3="",
        tensors=(StoredTensor("fp32/flat", "F32", numel, 0),), chunks=(Chunk("w", 0, numel, "flat", 0),), digests={},
        zero_stage=1, parameters={"w": (numel,)},
    )  # fmt: skip


def test_what_is_read_for_a_device_arrives_there() -> None:
    """Through two buffers of 1 MiB, 160 times over. A buffer that is filled before the device has read it shows."""
    content = torch.arange(40 << 20, dtype=torch.int32)
    target = torch.zeros(40 << 20, dtype=torch.int32, device="cuda")

    def read(manifest: object, ranges: Sequence[ReadRange]) -> int:
        for each in ranges:
            assert each.target.is_pinned(), "the copy would wait for the device"
            each.target.copy_(content[each.offset : each.offset + each.numel])
        return sum(each.target.nbytes for each in ranges)

    source: Any = SimpleNamespace(read=read)
    wanted = [ReadRange(0, "a", 0, target.numel(), target)]
    # Behind work of a second: no copy is made before the first buffers are filled.
    torch.cuda._sleep(2_000_000_000)
    assert reading._read(source, None, wanted, 1 << 20) == target.nbytes  # type: ignore[arg-type]
    assert torch.equal(target.cpu(), content)


def test_the_wait_in_a_collective_is_known_when_the_device_has_passed_it(nccl: dist.ProcessGroup) -> None:
    """A handle's collective stands behind a kernel of a second on another stream: the caller's stream waits for it."""
    device = torch.device("cuda", 0)
    ledger = CollectiveLedger(device, {nccl: "dp"})
    reduce = ledger.timed("all_reduce", dist.all_reduce)
    tensor, beside = torch.ones(1 << 20, device=device), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    reduce(tensor, group=nccl)
    torch.cuda.synchronize()
    ledger.passed_s()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(2_000_000_000)
        handle = reduce(tensor, group=nccl, async_op=True)
    handle.wait()
    assert ledger.passed_s() == 0.0, "the training thread has waited for the device"
    torch.cuda.synchronize()
    assert 0.3 < ledger.passed_s() < 10.0


def test_nvml_tells_of_this_device_and_nothing_against_it() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    device = NvmlDevice.find(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    assert device is not None
    health = device.health()
    assert health.name == torch.cuda.get_device_name()
    assert unfit(health) is None, health
    assert health.links == health.usual_links
    assert 0 < device.clocks().sm_mhz <= device.clocks().highest_mhz
    assert (Path("/sys/bus/pci/devices") / sysfs_address(device.bus_id()) / "numa_node").exists()
    errors = device.watch()
    assert errors is not None
    assert errors.next(0.1) is None
    errors.close()
    # By the identity that torch tells.
    assert EnergyMeter(torch.device("cuda", 0))._device is not None


def test_memory_for_snapshots_can_be_pinned() -> None:
    """A sandboxed kernel may refuse it; all figures of snapshots are those of pageable copies then."""
    device = torch.device("cuda", 0)
    pool = HostPool(device)
    copied = pool.copy([HostCopy("a", torch.ones(1 << 20, device=device))])
    assert pool._pins._pinned
    assert not pool._pins._refused
    assert copied["a"].sum() == 1 << 20
    pool.close()

"""What a device needs of a checkpoint comes through two buffers, whose next content never overtakes the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_device import LateDevice

from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.core.errors import StorageError
from elastic.training.state import reading


class Stored:
    """A source in which the element at each place says where it is."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.longest = 0

    def read(self, manifest: Any, ranges: Sequence[ReadRange]) -> BytesRead:
        self.device.seen.append("read")
        self.longest = max(self.longest, sum(each.target.nbytes for each in ranges))
        for each in ranges:
            assert each.target.numel() == each.numel
            each.target.copy_(values(each.rank, each.offset, each.numel, each.target.dtype))
        return BytesRead(storage=sum(each.target.nbytes for each in ranges))


def values(rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(offset, offset + numel) * 3 + rank) % 101).to(dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    late = LateDevice()
    monkeypatch.setattr(reading, "DeviceStream", lambda device: late)
    monkeypatch.setattr(reading, "enqueues", lambda device: True)
    return late


def wanted() -> list[ReadRange]:
    """Several ranks, dtypes and lengths, some longer than a buffer."""
    kinds = [(1, "a", 7, 500, torch.float32), (0, "a", 0, 33, torch.float32), (0, "b", 5, 301, torch.bfloat16)]
    kinds += [(0, "c", 2, 1, torch.bool), (2, "a", 0, 64, torch.float32), (0, "a", 33, 90, torch.int64)]
    return [ReadRange(rank, key, at, count, torch.zeros(count, dtype=dtype)) for rank, key, at, count, dtype in kinds]


@pytest.mark.parametrize("buffer_bytes", [16, 100, 256, 1 << 20])
def test_every_element_arrives_however_late_the_device_is(device: LateDevice, buffer_bytes: int) -> None:
    ranges, source = wanted(), Stored(device)
    count = reading._read(source, None, ranges, buffer_bytes)  # type: ignore[arg-type]
    assert count.storage == count.total == sum(each.target.nbytes for each in ranges)
    for each in ranges:
        assert torch.equal(each.target, values(each.rank, each.offset, each.numel, each.target.dtype)), each.key
    assert source.longest <= buffer_bytes


def test_one_buffer_is_read_while_the_other_is_copied(device: LateDevice) -> None:
    ranges = [ReadRange(0, "a", 0, 128, torch.zeros(128))]
    reading._read(Stored(device), None, ranges, 128)  # type: ignore[arg-type]
    assert device.seen == [
        "read", "batch 0 is enqueued", "read", "batch 1 is enqueued", "batch 0 is waited for",
        "read", "batch 2 is enqueued", "batch 1 is waited for", "read", "batch 3 is enqueued",
        "batch 2 is waited for", "batch 3 is waited for",
    ]  # fmt: skip


def test_a_source_that_fails_leaves_no_buffer_registered(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    open_pins: set[int] = set()

    class Pins:
        def __init__(self, device: torch.device) -> None: ...

        def pin(self, memory: torch.Tensor) -> None:
            open_pins.add(memory.data_ptr())

        def close(self) -> None:
            open_pins.clear()

    def fail(manifest: Any, ranges: Sequence[ReadRange]) -> BytesRead:
        assert open_pins, "it is read into pinned memory"
        raise StorageError("gone")

    monkeypatch.setattr(reading, "Pins", Pins)
    with pytest.raises(StorageError, match="gone"):
        reading._read(SimpleNamespace(read=fail), None, wanted(), 64)  # type: ignore[arg-type]
    assert open_pins == set()


def test_what_lies_in_host_memory_is_read_straight_into_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU training, and the optimizer that is offloaded from a device: in one call, as much at once as there is."""
    late = LateDevice()
    ranges, source = wanted(), Stored(late)
    targets = [each.target.data_ptr() for each in ranges]
    places: list[int] = []
    read = source.read

    def watched(manifest: Any, asked: Sequence[ReadRange]) -> int:
        places.extend(each.target.data_ptr() for each in asked)
        return read(manifest, asked)

    reading._read(SimpleNamespace(read=watched), None, ranges, 64)  # type: ignore[arg-type]
    assert (places, late.seen) == (targets, ["read"])


def test_a_device_without_room_for_both_reads_into_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, refused = torch.zeros, [torch.OutOfMemoryError("full")]

    def full(*size: int, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            raise refused.pop()
        return zeros(*size, **kwargs)

    monkeypatch.setattr(torch, "zeros", full)
    found = reading.zeros(8, "F32", torch.device("cuda"))
    assert (found.device.type, found.tolist(), refused) == ("cpu", [0.0] * 8, [])

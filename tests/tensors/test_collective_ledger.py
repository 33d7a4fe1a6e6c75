"""The ledger on a process group of one rank: bytes, axes, handles, and what it keeps of groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from simulated_device import Device, SimulatedStream

from elastic.comm import collective_ledger
from elastic.comm.collective_ledger import CollectiveCall, CollectiveLedger
from elastic.core.policy.stragglers import StragglerWatch
from elastic.core.settings import StragglerSettings


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_calls_are_folded_by_operation_axis_and_dtype(group: dist.ProcessGroup) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {group: "dp"})
    reduce = ledger.timed("all_reduce", dist.all_reduce)
    for tensor in (torch.ones(8), torch.ones(4), torch.ones(2, dtype=torch.float64)):
        reduce(tensor, group=group)
    ledger.timed("barrier", dist.barrier)()
    rows = {(use.op, use.axis, use.dtype): (use.calls, use.bytes) for use in ledger.take()}
    assert rows == {
        ("all_reduce", "dp", "float32"): (2, 48),
        ("all_reduce", "dp", "float64"): (1, 16),
        # The default group has the same ranks as the mesh's.
        ("barrier", "dp", ""): (1, 0),
    }
    assert ledger.take() == ()
    assert ledger.waited_s > 0.0


def test_the_payload_is_the_larger_side(group: dist.ProcessGroup) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {group: "dp"})
    ledger.timed("all_gather", dist.all_gather)([torch.empty(3, dtype=torch.bfloat16)], torch.ones(3).bfloat16())
    ledger.timed("reduce_scatter", lambda output, inputs: None)(torch.empty(2), [torch.ones(2), torch.ones(2)])
    assert [(use.op, use.dtype, use.bytes) for use in ledger.take()] == [
        ("all_gather", "bfloat16", 6),
        ("reduce_scatter", "float32", 16),
    ]


def test_a_handle_counts_when_it_is_waited_for_and_once(group: dist.ProcessGroup) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {group: "dp"})
    tensor = torch.ones(4)
    handle = ledger.timed("all_reduce", dist.all_reduce)(tensor, group=group, async_op=True)
    assert ledger.take() == ()
    handle.wait()
    handle.wait()
    assert handle.is_completed()
    (use,) = ledger.take()
    assert (use.calls, use.bytes) == (1, 16)
    assert 0.0 < use.waited_s <= use.seconds


def test_who_watches_is_told_of_each_call_when_it_is_complete(group: dist.ProcessGroup) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {group: "dp"})
    told: list[CollectiveCall] = []
    reduce = ledger.timed("all_reduce", dist.all_reduce)
    reduce(torch.ones(8))
    ledger.watch = told.append
    handle = reduce(torch.ones(4), async_op=True)
    reduce(torch.ones(2, dtype=torch.float64))
    assert [(call.dtype, call.bytes) for call in told] == [("float64", 16)]
    handle.wait()
    handle.wait()
    assert [(call.op, call.axis, call.dtype, call.bytes) for call in told] == [
        ("all_reduce", "dp", "float64", 16),
        ("all_reduce", "dp", "float32", 16),
    ]
    assert told[1].began_s < told[0].began_s
    ledger.watch = None
    reduce(torch.ones(1))
    assert len(told) == 2
    # The rows are those of all calls, watched or not.
    rows = {use.dtype: use for use in ledger.take()}
    assert (rows["float32"].calls, rows["float64"].calls) == (3, 1)
    assert (rows["float64"].seconds, rows["float64"].waited_s) == (told[0].seconds, told[0].waited_s)
    # The other one was made in the meantime: nobody waited for this one then.
    assert 0.0 < told[1].waited_s <= told[1].seconds - told[0].seconds


def test_other_groups_are_named_by_their_size(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0] if group is None else [0, 1])
    call = ledger.timed("broadcast", lambda tensor, group=None: None)
    call(torch.ones(1))
    call(torch.ones(1), group)
    assert [use.axis for use in ledger.take()] == ["2 ranks", "world"]


def test_a_failed_call_is_not_a_row_and_its_time_counts(group: dist.ProcessGroup) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {group: "dp"})

    def fails(tensor: torch.Tensor) -> None:
        raise RuntimeError("the peer is gone")

    with pytest.raises(RuntimeError, match="the peer is gone"):
        ledger.timed("all_reduce", fails)(torch.ones(1))
    assert ledger.take() == ()
    assert ledger.waited_s > 0.0


def test_after_close_no_group_is_kept(group: dist.ProcessGroup) -> None:
    ledger = CollectiveLedger(torch.device("cpu"), {group: "dp"})
    ledger.watch = lambda call: None
    ledger.close()
    assert not ledger._axes
    assert ledger.watch is None, "it refers to what the user's function holds"


class Rank:
    """One rank on a simulated device: what it enqueues, and what its ledger says of the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        monkeypatch.setattr(SimulatedStream, "simulated", self.device, raising=False)
        monkeypatch.setattr(collective_ledger, "DeviceStream", SimulatedStream)
        self.ledger = CollectiveLedger(torch.device("cuda", 0), {})
        self.ledger._axis = lambda args, kwargs: "dp"  # type: ignore[method-assign]

    def reduce(self, all_here: float, seconds: float) -> None:
        """NCCL's kernel ends on all ranks at once; the call returns before it begins."""

        def call(tensor: torch.Tensor) -> None:
            self.device.wait_until(all_here)
            self.device.work(seconds)

        self.ledger.timed("all_reduce", call)(torch.ones(4))


def steps(ranks: list[Rank], compute_s: list[float], count: int) -> Iterator[list[float]]:
    """By rank, the seconds outside of collectives of each step: a computation, a reduction, the update."""
    for _ in range(count):
        begun = [rank.device.now for rank in ranks]
        for rank, seconds in zip(ranks, compute_s, strict=True):
            rank.device.work(seconds)
        all_here = max(rank.device.free_at for rank in ranks)
        for rank in ranks:
            rank.reduce(all_here, 0.25)
            rank.device.work(0.125)
            assert rank.ledger.passed_s() == 0.0, "nothing is known before the device has passed it"
            # The loss is read.
            rank.device.synchronize()
        yield [rank.device.now - at - rank.ledger.passed_s() for rank, at in zip(ranks, begun, strict=True)]


def test_the_slow_device_is_the_one_whose_stream_stands_least_in_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks show the same step time, and each thread returns from each call at once."""
    ranks = [Rank(monkeypatch) for _ in range(4)]
    watch = StragglerWatch(StragglerSettings(window_steps=3, windows=2, calibration_windows=1))
    watch.begin(1, [10, 11, 12, 13])
    found = []
    for compute_s in ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0]):
        for own_s in steps(ranks, compute_s, 6):
            assert own_s == pytest.approx([seconds + 0.125 for seconds in compute_s])
            found += watch.step(1, own_s)
    assert [(event.worker, round(event.factor, 2)) for event in found] == [(12, 1.89)]
    (row,) = ranks[0].ledger.take()
    assert (row.calls, row.waited_s) == (12, pytest.approx(6 * 0.25 + 6 * 1.25)), "it stood there for the slow one"


def test_a_handle_on_a_device_counts_what_the_stream_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed between the call and its wait is overlapped."""
    rank = Rank(monkeypatch)
    device, done_at = rank.device, rank.device.now + 2.0

    class Handle:
        def wait(self) -> None:
            device.wait_until(done_at)

    handle = rank.ledger.timed("all_gather", lambda tensor: Handle())(torch.ones(4))
    device.work(1.5)
    handle.wait()
    assert rank.ledger.take() == (), "the device is not there yet"
    device.synchronize()
    assert rank.ledger.passed_s() == pytest.approx(0.5)
    (row,) = rank.ledger.take()
    assert (row.seconds, row.waited_s) == (pytest.approx(2.0), pytest.approx(0.5))
    assert rank.ledger.passed_s() == 0.0

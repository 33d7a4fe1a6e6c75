"""The ledger of one rank's collectives: operation, axis, dtype, calls, bytes and seconds, folded step by step.

With synchronous collectives all ranks have the same step time, and the slow rank is the one that waits least: a step's
time less `waited_s` is the rank's own.

On a device a collective is only enqueued. It is timed by events on the stream that enqueues it and waits for it, which
are read once the device has reached them, so nothing waits for the device; the row may come with a later step. What a
stream waits there is what a thread waits on the CPU: `passed_s`.

`watch`, where it is set, is told of every single call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from elastic.comm.device_stream import DeviceStream, enqueues
from elastic.core.data.collectives import CollectiveUse

Call = Callable[..., Any]
# Operation, axis, dtype; and one call of it: that, its payload in bytes, when it began, how long the thread was in it,
# and the mark before it on the stream.
_Key = tuple[str, str, str]
_Use = tuple[_Key, int, float, float, Any]


@dataclass(frozen=True)
class CollectiveCall:
    """One finished call: fields as in `CollectiveUse`. `began_s` is time.perf_counter() when it was made."""

    op: str
    axis: str
    dtype: str
    bytes: int
    began_s: float
    seconds: float
    waited_s: float


class CollectiveLedger:
    """Calls made through `timed` are counted from then on. `waited_s` only grows: seconds that the calling thread spent
    in collectives; on a device the stream, as far as it is known."""

    def __init__(self, device: torch.device, axes: Mapping[dist.ProcessGroup, str]) -> None:
        """`axes` names the groups of the mesh."""
        self.waited_s = 0.0
        self._stream = DeviceStream(device) if enqueues(device) else None
        self._axes: dict[Any, str] = dict(axes)
        # Calls, bytes, seconds, of which waited: plain lists, since this is done for every call.
        self._rows: dict[_Key, list[Any]] = {}
        # The marks before a call, before the stream waited for it, and after.
        self._pending: list[tuple[_Key, int, float, Any, Any, Any]] = []
        # The marks before and after an exchange of the platform's own.
        self._waits: list[tuple[Any, Any]] = []
        self._passed_s = 0.0
        # What a reduction of the platform's own says of itself, for the report of the step.
        self.remark = ""
        # Told of each call when it is complete, on the thread that makes the calls; on a device by `take`.
        self.watch: Callable[[CollectiveCall], None] | None = None

    @property
    def on_device(self) -> bool:
        """`waited_s` is known later than when a call returns."""
        return self._stream is not None

    def name_axis(self, group: dist.ProcessGroup, axis: str) -> None:
        """Another group of the mesh."""
        self._axes[group] = axis

    def timed(self, op: str, call: Call, axis: str = "") -> Call:
        """The same call, counted: its largest tensor, or where it is given none what it returns. A handle that it
        returns is counted until the end of its `wait`. `axis` takes the place of the name of the call's group."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            payload, dtype = _payload(args, kwargs)
            key = (op, axis or self._axis(args, kwargs), dtype)
            mark = self.mark()
            began = time.perf_counter()
            try:
                result = call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                if mark is None:
                    self.waited_s += spent
            if hasattr(result, "wait"):
                return _Handle(result, self, (key, payload, began, spent, mark))
            if not dtype:
                payload, dtype = _payload((result,), {})
                key = (*key[:2], dtype)
            self._done((key, payload, began, spent, mark), spent, spent, mark)
            return result

        return wrapped

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an exchange of the platform's own, which is no row: the thread, or on a device its stream, waits for
        the others in it."""
        began, mark = time.perf_counter(), self.mark()
        try:
            yield
        finally:
            if mark is None:
                self.waited_s += time.perf_counter() - began
            else:
                self._waits.append((mark, self.mark()))

    def take(self) -> tuple[CollectiveUse, ...]:
        """What has been completed since the last call, in the order of the names. Does not wait for the device."""
        self._look()
        rows, self._rows = self._rows, {}
        return tuple(CollectiveUse(*key, *rows[key]) for key in sorted(rows))

    def take_remark(self) -> str:
        """What was remarked since the last call."""
        remark, self.remark = self.remark, ""
        return remark

    def passed_s(self) -> float:
        """On a device, after a synchronisation: the seconds that streams have stood in collectives since the last call.

        Where an engine reduces on several streams at once, the sum of them.
        """
        self._look()
        before, self._passed_s = self._passed_s, self.waited_s
        return self.waited_s - before

    def close(self) -> None:
        """Release the groups: one that is kept keeps its sockets open."""
        self._axes.clear()
        self._pending.clear()
        self._waits.clear()
        self.watch = None

    def waited(self, use: _Use, wait_s: float, since: Any) -> None:
        """A handle's first wait is over, after `wait_s`; it began at the mark `since`."""
        if since is None:
            self.waited_s += wait_s
        _, _, began, called_s, _ = use
        self._done(use, time.perf_counter() - began, called_s + wait_s, since)

    def mark(self) -> Any:
        """On a device: now, on the stream. None on the CPU."""
        return None if self._stream is None else self._stream.mark(timed=True)

    def _done(self, use: _Use, seconds: float, waited_s: float, since: Any) -> None:
        key, payload, began, _, mark = use
        if mark is not None:
            self._pending.append((key, payload, began, mark, since, self.mark()))
        else:
            self._add(key, payload, began, seconds, waited_s)

    def _look(self) -> None:
        """The calls that the device has completed become rows."""
        waits, self._waits = self._waits, []
        for before, after in waits:
            if after.query():
                self.waited_s += before.elapsed_time(after) / 1000.0
            else:
                self._waits.append((before, after))
        pending, self._pending = self._pending, []
        for call in pending:
            key, payload, began, start, since, end = call
            if end.query():
                # Events count milliseconds.
                waited_s = since.elapsed_time(end) / 1000.0
                self.waited_s += waited_s
                self._add(key, payload, began, start.elapsed_time(end) / 1000.0, waited_s)
            else:
                self._pending.append(call)

    def _add(self, key: _Key, payload: int, began: float, seconds: float, waited_s: float) -> None:
        if self.watch is not None:
            self.watch(CollectiveCall(*key, payload, began, seconds, waited_s))
        row = self._rows.get(key)
        if row is None:
            self._rows[key] = [1, payload, seconds, waited_s]
            return
        row[0] += 1
        row[1] += payload
        row[2] += seconds
        row[3] += waited_s

    def _axis(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        group = kwargs.get("group")
        if group is None:
            for value in args:
                if isinstance(value, dist.ProcessGroup):
                    group = value
        name = self._axes.get(group)
        if name is None:
            self._axes[group] = name = self._name(group)
        return name

    def _name(self, group: Any) -> str:
        """Of a group that is none of the mesh's: DeepSpeed makes several over the same ranks."""
        ranks = dist.get_process_group_ranks(group)
        for known, name in self._axes.items():
            if known is not None and dist.get_process_group_ranks(known) == ranks:
                return name
        return "world" if len(ranks) == dist.get_world_size() else f"{len(ranks)} ranks"


class _Handle:
    """torch's handle of a pending collective with its wait timed."""

    def __init__(self, handle: Any, ledger: CollectiveLedger, use: _Use) -> None:
        self._handle, self._ledger = handle, ledger
        self._use: _Use | None = use

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        use, self._use = self._use, None
        since = None if use is None else self._ledger.mark()
        began = time.perf_counter()
        try:
            return self._handle.wait(*args, **kwargs)
        finally:
            if use is not None:
                self._ledger.waited(use, time.perf_counter() - began, since)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _payload(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[int, str]:
    """(bytes of the largest argument, its dtype): lists of tensors count as one. (0, "") where there is no tensor."""
    largest, dtype = -1, None
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            size, kind = value.nbytes, value.dtype
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            size, kind = sum(tensor.nbytes for tensor in value), value[0].dtype
        else:
            continue
        if size > largest:
            largest, dtype = size, kind
    return (0, "") if dtype is None else (largest, _dtype_name(dtype))


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

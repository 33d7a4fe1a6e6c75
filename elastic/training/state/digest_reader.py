"""Content checks of live tensors, on a thread of their own where the tensors do not change meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch

from elastic.checkpoint.digest import device_total, partial_digests, unsigned
from elastic.comm.device_stream import DeviceStream, enqueues
from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, RankLayout

# 0.2 s per GB on one core; 80 GB of device memory are read long before that.
_LIMIT_S = 600.0
# For the tensor that is being copied when reading is stopped.
_STOP_LIMIT_S = 10.0


def digests(chunks: Iterable[Chunk], tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """The contribution of these tensors, "<kind>/<buffer>", to the digest of each "<kind>/<parameter>"."""
    by_buffer: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_buffer.setdefault(chunk.buffer, []).append(chunk)
    found: dict[str, int] = {}
    names: list[str] = []
    totals: list[torch.Tensor] = []
    for key, tensor in tensors:
        kind, buffer = key.split("/", 1)
        flat, own = tensor.detach().reshape(-1), tuple(by_buffer.get(buffer, ()))
        del tensor
        if _reads_itself(flat):
            names += [f"{kind}/{chunk.name}" for chunk in own]
            totals += [
                device_total(flat[chunk.offset : chunk.offset + chunk.numel], f"{kind}/{chunk.name}", chunk.start)
                for chunk in own
            ]
        else:
            found |= partial_digests(RankLayout(own, {buffer: flat.numel()}), {key: flat})
    # The only wait for a device. A parameter may have several chunks.
    for name, total in zip(names, unsigned(totals), strict=True):
        found[name] = (found.get(name, 0) + total) % 2**64
    return found


def _reads_itself(tensor: torch.Tensor) -> bool:
    """Is the digest computed where the tensor lies? Copying a device's state to pageable memory takes seconds."""
    return tensor.device.type != "cpu"


class Reader:
    """Begins to read at once. The tensors must not change before `result` has returned."""

    def __init__(self, chunks: Iterable[Chunk], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._pieces = tuple(chunks)
        self._tensors = dict(tensors)
        self._stream: DeviceStream | None = None
        self._found: dict[str, int] = {}
        self._error: Exception | None = None
        if enqueues(device):
            # Not behind the forward pass that follows, but after the copies that filled the tensors.
            self._stream = DeviceStream(device, own=True)
            self._stream.follow()
        self._thread = threading.Thread(target=self._read, name="elastic-verify", daemon=True)
        self._thread.start()

    def result(self) -> dict[str, int]:
        """Wait for the digests. Raises what reading raised."""
        self._thread.join(_LIMIT_S)
        if self._thread.is_alive():
            raise IntegrityError(f"the restored state could not be read again within {_LIMIT_S:.0f} s")
        if self._error is not None:
            raise self._error
        return self._found

    def stop(self) -> None:
        """Read no further: tensors that are still to be read must not stay in the device's memory, which the next
        engine needs. Idempotent."""
        self._tensors.clear()
        self._thread.join(_STOP_LIMIT_S)

    def _read(self) -> None:
        try:
            with self._stream.used() if self._stream is not None else nullcontext():
                self._found = digests(self._pieces, self._taken())
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            self._error = error

    def _taken(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            try:
                yield self._tensors.popitem()
            except KeyError:
                return

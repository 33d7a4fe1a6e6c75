"""Verification that the tensors that a forward pass uses follow the masters, on every rank.

Two checks together cover every element of every replica: each rank compares the elements whose masters it holds, and
all ranks compare hashes of the parameters that they hold whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

from elastic.checkpoint.digest import device_total, unsigned
from elastic.engines.live_state import Master, Weight

# One bit less than the hash: `Agreement` compares numbers that can be negated.
MASK63 = (1 << 63) - 1
# Elements per comparison on the host.
_BLOCK = 1 << 20


def unfaithful(masters: Iterable[Master], weights: Iterable[Weight]) -> set[str]:
    """Names of parameters whose weights are not this rank's masters in the weights' dtype, bit for bit."""
    held: dict[str, list[Weight]] = {}
    for weight in weights:
        held.setdefault(weight.name, []).append(weight)
    wrong = set()
    for master in masters:
        flat = master.tensor.detach().reshape(-1)
        for chunk in master.chunks:
            part = flat[chunk.offset : chunk.offset + chunk.numel]
            own = held.get(chunk.name, [])
            if not own or not all(_follows(weight, chunk.start, part) for weight in own):
                wrong.add(chunk.name)
    return wrong


def whole_hashes(names: Sequence[str], weights: Iterable[Weight]) -> list[int]:
    """For each name a 63-bit hash of the weights that this rank holds whole; 0 where it does not."""
    whole = {weight.name: weight.tensor for weight in weights if weight.whole}
    found = dict(zip(whole, fingerprints(list(whole.values())), strict=True))
    return [found.get(name, 0) for name in names]


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """63-bit hashes of the tensors' bytes. They cannot be summed: they only tell whether whole tensors are equal.

    Waits once for a device, however many tensors lie there.
    """
    # Copying all weights to the host would take seconds. Every rank has the same kind of device.
    there = [number for number, tensor in enumerate(tensors) if tensor.numel() and _hashes_itself(tensor)]
    totals = dict(zip(there, unsigned([device_total(tensors[number], "") for number in there]), strict=True))
    return [
        totals[number] & MASK63 if number in totals else _host_fingerprint(tensor)
        for number, tensor in enumerate(tensors)
    ]


def fingerprint(tensor: torch.Tensor) -> int:
    return fingerprints([tensor])[0]


def _hashes_itself(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _host_fingerprint(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(raw.data) & MASK63


def _follows(weight: Weight, start: int, part: torch.Tensor) -> bool:
    """Are elements [start, start + len(part)) of `weight`, where it has them, those of the master?"""
    low, high = max(start, weight.start), min(start + part.numel(), weight.start + weight.tensor.numel())
    if low >= high:
        # A slice that this rank should have and does not have; a replica has all elements.
        return False
    expected = part[low - start : high - start]
    live = weight.tensor.detach()[low - weight.start : high - weight.start]
    if live.data_ptr() == expected.data_ptr() and live.dtype == expected.dtype:
        return True
    return _cast_equals(expected, live)


def _cast_equals(master: torch.Tensor, live: torch.Tensor) -> bool:
    """Is `live` exactly `master` in its own dtype? In blocks, so that the cast copy stays in the cache."""
    for at in range(0, live.numel(), _BLOCK):
        there = live[at : at + _BLOCK].contiguous()
        here = master[at : at + _BLOCK].to(device=there.device, dtype=there.dtype).contiguous()
        if not _same_bits(here.view(torch.uint8), there.view(torch.uint8)):
            return False
    return True


def _same_bits(here: torch.Tensor, there: torch.Tensor) -> bool:
    if here.is_cuda:
        return torch.equal(here, there)
    # numpy compares eight bytes at a time; torch takes seven times as long.
    left, right = here.numpy(), there.numpy()
    even = len(left) - len(left) % 8
    return bool(
        np.array_equal(left[:even].view(np.int64), right[:even].view(np.int64))
        and np.array_equal(left[even:], right[even:])
    )

"""Content checks of torch tensors, on the host or on their device; formula and reasons are in `hashing.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from elastic.checkpoint import hashing
from elastic.checkpoint.hashing import BLOCK, KEY_NAMES, OFFSET, digest_bytes, factors, piece_digests, places
from elastic.core.sharding.layout import RankLayout

# 16 Mi words, 128 MiB of products: enough to keep a device busy, and small compared to its memory.
_BLOCKS_AT_ONCE = 256

_DTYPE_NAMES = {key: name for name, key in KEY_NAMES.items()}


def partial_digests(layout: RankLayout, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The contribution of this rank's chunks to the digest of each "<kind>/<parameter>", each in [0, 2**64).

    `tensors` maps "<kind>/<buffer>" to 1-D contiguous CPU tensors. Padding is ignored.
    """
    return piece_digests(layout.chunks, {key: (_dtype_name(tensor), _raw(tensor)) for key, tensor in tensors.items()})


def digest(values: torch.Tensor, name: str, start: int = 0) -> int:
    """The partial digest of elements [start, start + len(values)) of the tensor `name` ("<kind>/<parameter>")."""
    return digest_bytes(_raw(values), _dtype_name(values), name, start)


def digest_rows(values: torch.Tensor, name: str, start: int, rows: int, stride: int) -> int:
    """The same of `rows` rows one after another in `values`, of which the first begins at element `start` of `name` and
    each other `stride` elements behind the one before."""
    return hashing.digest_rows(_raw(values), _dtype_name(values), name, start, rows, stride)


def digest_on_device(values: torch.Tensor, name: str, start: int = 0) -> int:
    """`digest` of a tensor of any shape, computed by its own device: one number is copied to the host."""
    return unsigned([device_total(values, name, start)])[0]


def unsigned(totals: Sequence[torch.Tensor]) -> list[int]:
    """Results of `device_total` as digests in [0, 2**64), with one copy to the host per device."""
    return [total % 2**64 for total in torch.stack(list(totals)).tolist()] if totals else []


def device_total(values: torch.Tensor, name: str, start: int = 0) -> torch.Tensor:
    """The digest of `values` as an int64 scalar on their device, without waiting for it.

    Takes 16 bytes of device memory per word, for at most `_BLOCKS_AT_ONCE` blocks of words at a time.
    """
    flat = values.detach().reshape(-1).contiguous()
    size = flat.element_size()
    words = flat.view(torch.uint8 if size == 1 else torch.int16 if size == 2 else torch.int32)
    block, low = divmod(start * size // words.element_size(), BLOCK)
    # First the rest of the block in which `start` lies, then whole blocks.
    head = min(BLOCK - low, words.numel()) if low else 0
    blocks = -(-(low + words.numel()) // BLOCK)
    weights = torch.from_numpy(factors(_dtype_name(values), name, blocks, block)).to(words.device)
    place = _places_on(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if head:
        total += words[:head].to(torch.int64).add_(OFFSET).mul_(place[low : low + head]).sum() * weights[0]
        words, weights = words[head:], weights[1:]
    for first in range(0, len(weights), _BLOCKS_AT_ONCE):
        # Integers wrap around in torch on every device, which is the reduction modulo 2**64.
        wide = words[first * BLOCK : (first + _BLOCKS_AT_ONCE) * BLOCK].to(torch.int64).add_(OFFSET)
        whole = wide.numel() // BLOCK
        rows, rest = wide[: whole * BLOCK].view(whole, BLOCK), wide[whole * BLOCK :]
        total += (rows.mul_(place).sum(1) * weights[first : first + whole]).sum()
        if rest.numel():
            total += rest.mul_(place[: rest.numel()]).sum() * weights[first + whole]
    return total


@lru_cache(maxsize=8)
def _places_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(places(), device=device)


def _dtype_name(values: torch.Tensor) -> str:
    return _DTYPE_NAMES[str(values.dtype)]


def _raw(values: torch.Tensor) -> memoryview:
    # A view as bytes, not a copy: numpy has no bfloat16.
    return values.detach().view(torch.uint8).numpy().data

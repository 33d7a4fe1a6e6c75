"""Content checks that do not depend on how a tensor is split into chunks, computed from raw bytes.

A tensor is read as 32-bit (or narrower) words; word i of a tensor with the key k contributes

    (word + OFFSET) * table[i mod B] * factor(k, i div B)   modulo 2**64

with a fixed pseudo-random odd table and pseudo-random odd factors (multilinear hashing, after Carter and Wegman 1979
and Dietzfelbinger 1996). The sum over all words is the digest, so the sum of partial digests is the digest of the
whole, whatever the chunks. The key is made of dtype, kind and name. Words are at most 32 bits wide
because a sign flip in a 64-bit word would only change the highest bit of a product, and two of them would cancel.

This detects mistakes and decay, not forgery: an attacker who chooses the data can make two tensors with one digest.

This module does not import torch: the process that keeps snapshots in a node's memory stays small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic.core.checkpoint.manifest_json import ITEM_BYTES
from elastic.core.sharding.layout import Chunk

if TYPE_CHECKING:
    import numpy.typing as npt

# The table and a chunk of words widened to 64 bits fit into a core's own cache together.
BLOCK = 1 << 16
# Makes zeros count, so that a digest depends on their number.
OFFSET = 1 << 33
_MASK64 = (1 << 64) - 1

# Keys are made with torch's names of dtypes. They must never change: existing checkpoints have digests with them.
KEY_NAMES = {
    "F64": "torch.float64",
    "F32": "torch.float32",
    "F16": "torch.float16",
    "BF16": "torch.bfloat16",
    "F8_E4M3": "torch.float8_e4m3fn",
    "F8_E5M2": "torch.float8_e5m2",
    "I64": "torch.int64",
    "I32": "torch.int32",
    "I16": "torch.int16",
    "I8": "torch.int8",
    "U64": "torch.uint64",
    "U32": "torch.uint32",
    "U16": "torch.uint16",
    "U8": "torch.uint8",
    "BOOL": "torch.bool",
    "C64": "torch.complex64",
}


def digest_bytes(data: memoryview, dtype: str, name: str, start: int = 0) -> int:
    """The partial digest of the elements in `data`, which begin at element `start` of `name` ("<kind>/<parameter>").

    `dtype` is the safetensors name. Releases the GIL while it computes, block by block.
    """
    words: npt.NDArray[Any] = np.frombuffer(data, dtype=_word_type(dtype))
    first = start * ITEM_BYTES[dtype] // words.itemsize
    seed = _seed(KEY_NAMES[dtype], name)
    table, sums = _table()
    wide = np.empty(min(BLOCK, words.size), dtype=np.int64)
    total = done = 0
    while done < words.size:
        block, low = divmod(first + done, BLOCK)
        count = min(BLOCK - low, words.size - done)
        products = wide[:count]
        products[:] = words[done : done + count]
        products *= table[low : low + count]
        total += (int(products.sum()) + OFFSET * (sums[low + count] - sums[low])) * _factor(seed, block)
        done += count
    return total & _MASK64


def digest_rows(data: memoryview, dtype: str, name: str, start: int, rows: int, stride: int) -> int:
    """`digest_bytes` of `rows` rows one after another in `data`, of which the first begins at element `start` of `name`
    and each other `stride` behind the one before."""
    words: npt.NDArray[Any] = np.frombuffer(data, dtype=_word_type(dtype))
    width, ratio = words.size // max(1, rows), ITEM_BYTES[dtype] // words.itemsize
    if rows <= 1 or width in (0, stride * ratio):
        return digest_bytes(data, dtype, name, start)
    if width >= BLOCK:
        size = len(data) // rows
        parts = (data[row * size : (row + 1) * size] for row in range(rows))
        return sum(digest_bytes(own, dtype, name, start + row * stride) for row, own in enumerate(parts)) & _MASK64
    seed, table = _seed(KEY_NAMES[dtype], name), places()
    at_once, total = BLOCK // width, 0
    for row in range(0, rows, at_once):
        values = words.reshape(rows, width)[row : row + at_once]
        index = (start + row * stride) * ratio + np.arange(len(values))[:, None] * (stride * ratio) + np.arange(width)
        blocks = index // BLOCK
        index %= BLOCK
        products = (values.astype(np.int64) + OFFSET) * table[index]
        first = int(blocks[0, 0])
        known = _factors(seed, first, int(blocks[-1, -1]) - first + 1)
        total += int((products * known[blocks - first]).sum())
    return total & _MASK64


def piece_digests(
    chunks: Iterable[Chunk],
    buffers: Mapping[str, tuple[str, memoryview]],
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, int]:
    """The contribution of the chunks to the digest of each "<kind>/<parameter>", each in [0, 2**64).

    `buffers` maps "<kind>/<buffer>" to its dtype's safetensors name and its bytes. Padding is ignored.
    `on_bytes` is called with the size of every chunk that is done.
    """
    by_buffer: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_buffer.setdefault(chunk.buffer, []).append(chunk)
    digests: dict[str, int] = {}
    for key, (dtype, raw) in buffers.items():
        kind, buffer = key.split("/", 1)
        item = ITEM_BYTES[dtype]
        for chunk in by_buffer.get(buffer, ()):
            name = f"{kind}/{chunk.name}"
            with raw[chunk.offset * item : (chunk.offset + chunk.numel) * item] as part:
                value = digest_bytes(part, dtype, name, chunk.start)
                on_bytes(len(part))
            digests[name] = (digests.get(name, 0) + value) & _MASK64
    return digests


def places() -> npt.NDArray[np.int64]:
    """The multipliers of the words of a block, by position."""
    return _table()[0]


def factors(dtype: str, name: str, blocks: int, first: int = 0) -> npt.NDArray[np.int64]:
    """The factors of `blocks` blocks of a tensor, from block `first` on; modulo 2**64, as int64."""
    return _factors(_seed(KEY_NAMES[dtype], name), first, blocks)


def _word_type(dtype: str) -> type[np.generic]:
    # Signed words, widened with their sign: as good as unsigned ones for a check, and as in the first release.
    size = ITEM_BYTES[dtype]
    return np.uint8 if size == 1 else np.int16 if size == 2 else np.int32


@lru_cache(maxsize=1)
def _table() -> tuple[npt.NDArray[np.int64], list[int]]:
    """The table, and the sums of its first 0, 1, ... entries."""
    # From a hash, not from a random number generator, which may differ between releases.
    raw = hashlib.shake_256(b"ray-elastic content check 1").digest(8 * BLOCK)
    table = np.frombuffer(raw, dtype=np.int64) | np.int64(1)
    sums = [0, *np.cumsum(table).tolist()]
    return table, sums


@lru_cache(maxsize=4096)
def _seed(dtype: str, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")


def _factors(seed: int, first: int, blocks: int) -> npt.NDArray[np.int64]:
    return np.array([_factor(seed, first + block) for block in range(blocks)], dtype=np.uint64).view(np.int64)


def _factor(seed: int, block: int) -> int:
    value = (seed + (block + 1) * 0x9E3779B97F4A7C15) & _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return (value ^ value >> 31) | 1

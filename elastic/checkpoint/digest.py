"""Content checks that do not depend on how a tensor is cut.

A tensor is read as 32-bit (or narrower) words; word i of a tensor with the key k contributes

    (word + OFFSET) * table[i mod B] * factor(k, i div B)   modulo 2**64

with a fixed pseudo-random odd table and pseudo-random odd factors (multilinear hashing, after Carter and Wegman 1979
and Dietzfelbinger 1996). The sum over all words is the digest, so the sum of partial digests is the digest of the
whole, in whatever pieces the words were summed. The key is made of dtype, kind and name. Words are at most 32 bits wide
because a sign flip in a 64-bit word would only change the highest bit of a product, and two of them would cancel.

This finds mistakes and decay, not forgery: whoever can choose the data can make two tensors of one digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch

from elastic.core.layout import Piece, RankLayout

# The table and a chunk of words widened to 64 bits stay in a core's own cache together.
_BLOCK = 1 << 16
# Makes zeros count, so that a digest sees how many there are.
_OFFSET = 1 << 33
_MASK64 = (1 << 64) - 1


def partial_digests(layout: RankLayout, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What this rank's pieces add to the digest of each "<kind>/<parameter>", each in [0, 2**64).

    `tensors` maps "<kind>/<buffer>" to 1-D contiguous CPU tensors. Padding is not looked at.
    """
    by_buffer: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        by_buffer.setdefault(piece.buffer, []).append(piece)
    digests: dict[str, int] = {}
    for key, tensor in tensors.items():
        kind, buffer = key.split("/", 1)
        for piece in by_buffer.get(buffer, ()):
            name = f"{kind}/{piece.name}"
            values = tensor.narrow(0, piece.offset, piece.numel)
            digests[name] = (digests.get(name, 0) + digest(values, name, piece.start)) & _MASK64
    return digests


def digest(values: torch.Tensor, name: str, start: int = 0) -> int:
    """The partial digest of elements [start, start + len(values)) of the tensor `name` ("<kind>/<parameter>")."""
    words = _words(values)
    first = start * words.numel() // values.numel() if values.numel() else 0
    seed = _seed(str(values.dtype), name)
    table, sums = _table()
    total = done = 0
    while done < words.numel():
        block, low = divmod(first + done, _BLOCK)
        count = min(_BLOCK - low, words.numel() - done)
        product = torch.dot(words[done : done + count].to(torch.int64), table[low : low + count])
        total += (int(product) + _OFFSET * (sums[low + count] - sums[low])) * _factor(seed, block)
        done += count
    return total & _MASK64


def _words(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    size = values.element_size()
    # Signed words, widened with their sign: as good as unsigned ones for a check, and torch can widen them quickly.
    return values.view(torch.uint8 if size == 1 else torch.int16 if size == 2 else torch.int32)


@lru_cache(maxsize=1)
def _table() -> tuple[torch.Tensor, list[int]]:
    """The table, and the sums of its first 0, 1, ... entries."""
    # From a hash and not from a generator of random numbers, which may differ between releases of torch.
    raw = bytearray(hashlib.shake_256(b"ray-elastic content check 1").digest(8 * _BLOCK))
    table = torch.frombuffer(raw, dtype=torch.int64) | 1
    sums = [0, *torch.cumsum(table, 0).tolist()]
    return table, sums


def _seed(dtype: str, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")


def _factor(seed: int, block: int) -> int:
    value = (seed + (block + 1) * 0x9E3779B97F4A7C15) & _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return (value ^ value >> 31) | 1

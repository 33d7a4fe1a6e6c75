"""The global order of samples: which dataset index stands at which position, for ever, whatever the world size.

A *position* counts samples over the whole run (0, 1, 2, ... across epochs). Each epoch is a keyed permutation of the
dataset: an alternating Feistel network (Luby and Rackoff 1988) on just enough bits, and cycle walking (Black and
Rogaway 2002) for sizes that are not a power of two. Nothing is stored, so any rank can ask for any position at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from elastic.core.errors import UsageError

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SampleOrder:
    """The order of a dataset of `dataset_size` samples; `seed` may be any integer.

    With `block` the order is local, for data that is read in runs: blocks of so many neighbouring samples are permuted,
    and every `at_once` blocks that then follow each other are mixed. What a last block lacks of `block` samples is
    mixed by itself, at the end of each epoch. Depends on nothing else: not on the world size, the platform's hash seed
    or the Python version.
    """

    dataset_size: int
    seed: int = 0
    shuffle: bool = True
    block: int = 0
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.dataset_size < 1:
            raise UsageError(f"a dataset needs at least one sample, this one has {self.dataset_size}")

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, dataset index) of a position >= 0."""
        if position < 0:
            raise ValueError(f"positions begin at 0, got {position}")
        epoch, place = divmod(position, self.dataset_size)
        if not self.shuffle:
            return epoch, place
        if self.block:
            return epoch, self._local(epoch, place)
        return epoch, _permuted(place, self.dataset_size, _round_keys(self.seed, f"{epoch}"))

    def indices(self, start: int, stop: int) -> list[int]:
        """Dataset indices of the positions [start, stop), which may run over the end of an epoch."""
        return [self.at(position)[1] for position in range(start, stop)]

    def _local(self, epoch: int, place: int) -> int:
        whole = self.dataset_size // self.block * self.block
        if place >= whole:
            mixed = _permuted(place - whole, self.dataset_size - whole, _round_keys(self.seed, f"{epoch} rest"))
            return whole + mixed
        window, within = divmod(place, self.at_once * self.block)
        begin = place - within
        size = min(self.at_once * self.block, whole - begin)
        mixed = begin + _permuted(within, size, _round_keys(self.seed, f"{epoch} window {window}"))
        block, offset = divmod(mixed, self.block)
        keys = _round_keys(self.seed, f"{epoch} blocks")
        return _permuted(block, whole // self.block, keys) * self.block + offset


@lru_cache(maxsize=64)
def _round_keys(seed: int, purpose: str) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"ray-elastic samples {seed} {purpose}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 8 * _ROUNDS, 8))


def _permuted(place: int, size: int, keys: tuple[int, ...]) -> int:
    bits = (size - 1).bit_length()
    low_bits = (bits + 1) // 2
    # The network permutes [0, 2**bits), less than twice the size. Walking on from each value outside [0, size) is a
    # permutation of [0, size) and takes less than two rounds of it on average.
    while True:
        place = _feistel(place, bits - low_bits, low_bits, keys)
        if place < size:
            return place


def _feistel(value: int, high_bits: int, low_bits: int, keys: tuple[int, ...]) -> int:
    high, low = value >> low_bits, value & ((1 << low_bits) - 1)
    for number, key in enumerate(keys):
        # Halves may differ by one bit, so they are changed in turn instead of being swapped.
        if number % 2 == 0:
            low ^= _mix(high ^ key) & ((1 << low_bits) - 1)
        else:
            high ^= _mix(low ^ key) & ((1 << high_bits) - 1)
    return high << low_bits | low


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit changes every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31

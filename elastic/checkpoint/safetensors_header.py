"""The header of a safetensors file: 8 bytes of length, then JSON; the tensors follow without gaps.

We write it ourselves because the safetensors library needs all tensors of a file in memory; the tests read every file
back with the library. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.core.checkpoint.manifest_json import ITEM_BYTES
from elastic.core.errors import IntegrityError

# A longer header is damaged: that of a model with a million tensors has about 100 MB, the library's own limit.
_LONGEST = 100_000_000


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. `dtype` is the safetensors name; `begin` is the absolute offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


def in_file_order(tensors: Iterable[FileTensor]) -> list[FileTensor]:
    """The widest elements first, as the library does, so that every tensor begins at a multiple of its element size."""
    return sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))


def make_header(tensors: Iterable[FileTensor], metadata: Mapping[str, str]) -> tuple[bytes, tuple[FileTensor, ...]]:
    """The header of a file that holds the tensors in this order, and where each of them begins."""
    ordered = list(tensors)
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in ordered:
        end = at + tensor.bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed, begin = [], len(header)
    for tensor in ordered:
        placed.append(FileTensor(tensor.name, tensor.dtype, tensor.shape, begin))
        begin += tensor.bytes
    return header, tuple(placed)


def header_length(first: bytes, file: str) -> int:
    """The number of bytes of JSON after the first eight. Raises IntegrityError if these cannot be a length."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= _LONGEST:
        raise IntegrityError(f"{file} is not a safetensors file")
    return length


def read_header(text: bytes, file: str) -> dict[str, FileTensor]:
    """The tensors by name. Raises IntegrityError for JSON that is not a valid header."""
    found = {}
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensor = FileTensor(name, entry["dtype"], tuple(int(n) for n in entry["shape"]), 8 + len(text) + begin)
            if tensor.bytes != end - begin or begin < 0 or any(size < 0 for size in tensor.shape):
                raise IntegrityError(f"{file}: the bytes of {name!r} do not fit its shape {list(tensor.shape)}")
            found[name] = tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"the header of {file} is not that of a safetensors file: {error!r}") from error
    return found

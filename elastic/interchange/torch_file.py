"""A file of `torch.save` without having its tensors in memory: the pickle first, then one storage after the other.

The format is that of `torch/serialization.py` (`_save`): a zip file with `data.pkl`, in which each tensor refers to a
storage by number, and the bytes of each storage in `data/<number>`. `torch.load(..., weights_only=True)` reads it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.storage import _dtype_to_storage_type_map

_ALIGNMENT = "64"


@dataclass(frozen=True)
class LazyTensor:
    """Stands in for a tensor in the object that is saved. Equal `key`s are one storage: shared tensors stay shared."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        storage, stride = _Storage(self), tuple(torch.empty(self.shape, device="meta").stride())
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, stride, False, OrderedDict())


@dataclass(frozen=True)
class _Storage:
    tensor: LazyTensor


class _Pickler(pickle.Pickler):
    """Numbers the storages in the order in which the pickle names them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.numbers: dict[str, int] = {}
        self.order: list[LazyTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.tensor
        if tensor.key not in self.numbers:
            self.numbers[tensor.key] = len(self.order)
            self.order.append(tensor)
        numel = torch.Size(tensor.shape).numel()
        kind = getattr(torch, _dtype_to_storage_type_map()[tensor.dtype])
        return ("storage", kind, str(self.numbers[tensor.key]), "cpu", numel)


def save(value: Any, path: Path) -> None:
    """`torch.save(value, path)`, where tensors may be `LazyTensor`s; one of these is in memory at a time."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    # Any: torch's stubs do not know that it takes text and untyped storages.
    writer: Any = torch._C.PyTorchFileWriter(str(path))
    pickled = buffer.getvalue()
    writer.write_record("data.pkl", pickled, len(pickled))
    for name, text in ((".format_version", "1"), (".storage_alignment", _ALIGNMENT), ("byteorder", sys.byteorder)):
        writer.write_record(name, text, len(text))
    for number, tensor in enumerate(pickler.order):
        storage = tensor.read().contiguous().untyped_storage()
        writer.write_record(f"data/{number}", storage, storage.nbytes())
    writer.write_end_of_file()

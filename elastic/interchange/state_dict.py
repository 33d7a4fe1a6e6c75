"""The state_dict that an export writes: names, shapes and dtypes, and each tensor when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from elastic.core.errors import UsageError
from elastic.interchange.tensors import CheckpointTensors, TensorInfo

_NAMES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip


def export_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that floating-point tensors are cast to; None: each keeps the stored one. Raises UsageError."""
    if name is None:
        return None
    if isinstance(name, torch.dtype) and name in _NAMES.values():
        return name
    if isinstance(name, str) and name in _NAMES:
        return _NAMES[name]
    raise UsageError(f"an export has the dtype float32, bfloat16 or float16 (default: as stored), not {name!r}")


class ExportedState:
    """The checkpoint's state_dict in `dtype`. `read` gives one tensor and keeps none.

    As `module.to(dtype)` does, only floating-point tensors are cast, buffers too. `prefix` chooses a sub-module: names
    lose it, and tensors without it are left out. `names` are all that there are, by what they are called here.
    """

    def __init__(
        self,
        source: CheckpointTensors,
        dtype: torch.dtype | None = None,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self._dtype = dtype
        if names is None:
            names = {name.removeprefix(prefix): name for name in source.tensors if name.startswith(prefix)}
        self._names = names
        self.tensors: dict[str, TensorInfo] = {
            name: self._exported(name, source.tensors[own]) for name, own in names.items()
        }
        held = {own: name for name, own in names.items()}
        self.aliases: Mapping[str, str] = {
            alias.removeprefix(prefix): held[name]
            for alias, name in source.aliases.items()
            if alias.startswith(prefix) and name in held
        }

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole, contiguous, on the CPU. Raises IntegrityError where it is not what was written."""
        return self._source.read(self._names[name]).to(self.tensors[name].dtype)

    def _exported(self, name: str, info: TensorInfo) -> TensorInfo:
        cast = self._dtype is not None and info.dtype.is_floating_point
        return TensorInfo(name, info.kind, info.shape, self._dtype if cast and self._dtype else info.dtype)


Read = Callable[[str], torch.Tensor]

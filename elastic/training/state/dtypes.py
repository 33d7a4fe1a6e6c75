"""torch dtypes by their safetensors names: those whose values can be carried."""

from __future__ import annotations

import torch

from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.core.errors import IntegrityError, UsageError

_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Raises IntegrityError for a name that no checkpoint of this project has."""
    if name not in _BY_NAME:
        raise IntegrityError(f"a stored tensor has the unknown dtype {name!r}")
    return _BY_NAME[name]


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises UsageError naming the tensor, if its values cannot be carried."""
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise UsageError(f"{name!r} has dtype {dtype}, which a checkpoint cannot carry; known are {known}")

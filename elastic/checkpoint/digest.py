"""Content checks of torch tensors; the formula and why it is that one are in `words.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.checkpoint.words import KEY_NAMES, digest_bytes, piece_digests
from elastic.core.layout import RankLayout

_DTYPE_NAMES = {key: name for name, key in KEY_NAMES.items()}


def partial_digests(layout: RankLayout, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What this rank's pieces add to the digest of each "<kind>/<parameter>", each in [0, 2**64).

    `tensors` maps "<kind>/<buffer>" to 1-D contiguous CPU tensors. Padding is not looked at.
    """
    return piece_digests(layout.pieces, {key: (_dtype_name(tensor), _raw(tensor)) for key, tensor in tensors.items()})


def digest(values: torch.Tensor, name: str, start: int = 0) -> int:
    """The partial digest of elements [start, start + len(values)) of the tensor `name` ("<kind>/<parameter>")."""
    return digest_bytes(_raw(values), _dtype_name(values), name, start)


def _dtype_name(values: torch.Tensor) -> str:
    return _DTYPE_NAMES[str(values.dtype)]


def _raw(values: torch.Tensor) -> memoryview:
    # A view, not a copy: numpy has no bfloat16, but bytes it has.
    return values.detach().view(torch.uint8).numpy().data

"""Buffers that grow, or appear, while a model trains: a fresh model has them as it was built, the checkpoint as they
were when it was saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from elastic.checkpoint.shards import torch_dtype
from elastic.core.checkpoint.manifest import Json, Manifest
from elastic.engines.live_state import BUFFER, TensorSpec, whole_buffer
from elastic.engines.model.plain_names import named_modules

logger = logging.getLogger(__name__)

# Name -> shape.
Shapes = Mapping[str, tuple[int, ...]]


def shapes(specs: Iterable[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Of the persistent buffers. Others are caches, which the module fills by itself."""
    return {spec.name: spec.shape for spec in specs if spec.kind == BUFFER and spec.persistent}


def grown(built: Shapes, now: Shapes) -> dict[str, Json]:
    """Buffers that are not as the model was built: their shape then, None for those that did not exist."""
    return {
        name: list(built[name]) if name in built else None for name, shape in now.items() if built.get(name) != shape
    }


def adopt(module: torch.nn.Module, manifest: Manifest, grown_there: Mapping[str, Json], built: Shapes) -> None:
    """Give the buffers of a fresh model the shapes of the checkpoint, where they had grown from the same beginning.

    A buffer that was built otherwise here is left alone: it is of another model, which is for others to say.
    """
    for name, before in grown_there.items():
        if before != (list(built[name]) if name in built else None) or name not in manifest.parameters:
            continue
        path, _, leaf = name.rpartition(".")
        owner, shape = dict(named_modules(module))[path], tuple(manifest.parameters[name])
        live = owner._buffers.get(leaf)
        if live is not None:
            owner._buffers[leaf] = live.new_zeros(shape)
        else:
            device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
            owner.register_buffer(leaf, torch.zeros(shape, dtype=_dtype(manifest, name), device=device))
        logger.info("buffer %s has shape %s, to which it had grown before the checkpoint", name, shape)


def _dtype(manifest: Manifest, name: str) -> torch.dtype:
    key = f"{BUFFER}/{whole_buffer(name)}"
    stored = (tensor.dtype for shard in manifest.shards for tensor in shard.tensors if tensor.key == key)
    return torch_dtype(next(stored, "float32"))

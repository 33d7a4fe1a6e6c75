"""The weights that a run begins with, from files of another run or library, put into a fresh engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from elastic.comm.agreement import Agreement
from elastic.core.errors import IntegrityError
from elastic.core.settings import WeightsSettings
from elastic.engines.live_state import ShardedState, buffers
from elastic.engines.model.description import aliases
from elastic.interchange.weights import CheckpointWeights, Weights, match_names, open_weights

_log = logging.getLogger(__name__)

# Read and cast at once; what is larger is read in pieces.
_PIECE_BYTES = 64 << 20


def install_weights(sharded: ShardedState, settings: WeightsSettings, agreement: Agreement) -> None:
    """Parameters and buffers from `settings.source`, cast to the engine's dtypes; the optimizer begins anew.

    Collective; every rank reads its own parts. Raises on all ranks or on none: ModelMismatch (names or shapes differ,
    the first are named), UsageError (nothing readable there), IntegrityError or StorageError. After an error the engine
    must be thrown away.
    """
    error: Exception | None = None
    weights: Weights | None = None
    names: dict[str, str] = {}
    try:
        sharded.require_readable()
        weights = open_weights(settings)
        specs = sharded.specs()
        names = match_names(
            {spec.name: spec.shape for spec in specs},
            aliases(sharded.module),
            [spec.name for spec in specs if not spec.persistent],
            weights.shapes,
            settings,
        )
        sharded.begin_install()
        for target, name, start in _targets(sharded):
            if name in names:
                _fill(target, weights, names[name], start)
    except Exception as caught:  # noqa: BLE001 - the other ranks wait: they must learn of it, then it is raised
        error = caught
    agreement.raise_together(error, f"reading the weights in {settings.source}")
    assert weights is not None
    if isinstance(weights, CheckpointWeights):
        _verify(weights, agreement, settings.source)
    sharded.finish_install()
    _log.info("%d tensors were read from %s", len(names), settings.source)


def _targets(sharded: ShardedState) -> Iterator[tuple[torch.Tensor, str, int]]:
    """This rank's memory, in pieces: (1-D live tensor, name, its first element in the whole tensor)."""
    pieces = [(master.tensor, master.chunks) for master in sharded.masters()]
    pieces += [(extra.tensor, (extra.chunk,)) for extra in [*sharded.frozen(), *buffers(sharded.module)]]
    for tensor, chunks in pieces:
        live = tensor.detach()
        flat = live.reshape(-1)
        for chunk in chunks:
            yield flat[chunk.offset : chunk.offset + chunk.numel], chunk.name, chunk.start
        if flat.data_ptr() != live.data_ptr():
            # Not contiguous: the flat one is a copy.
            live.copy_(flat.view(live.shape))


def _fill(target: torch.Tensor, weights: Weights, name: str, start: int) -> None:
    step = max(1, _PIECE_BYTES // target.element_size())
    for at in range(0, target.numel(), step):
        part = target[at : at + step]
        part.copy_(weights.read(name, start + at, part.numel()))


def _verify(weights: CheckpointWeights, agreement: Agreement, source: str) -> None:
    """What all ranks have read, compared with the checkpoint's digests. A slice alone cannot be judged by its rank."""
    keys = sorted(weights.stored)
    totals = agreement.sums([part for key in keys for part in weights.read_so_far(key)])
    for key, digest, count in zip(keys, totals[::2], totals[1::2], strict=True):
        numel, written = weights.stored[key]
        # Replicated tensors are read whole by each of the ranks.
        if count % numel or digest != count // numel * written % 2**64:
            name = key.partition("/")[2]
            raise IntegrityError(f"{name!r} in {source} is not what was written: the checkpoint is damaged")

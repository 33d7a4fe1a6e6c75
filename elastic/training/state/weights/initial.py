"""The weights that a run begins with, from files of another run or library, put into a fresh engine; or into the whole
model, before ranks share its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
import xxhash

from elastic.comm.agreement import Agreement
from elastic.comm.lanes import Lanes
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.settings import WeightsSettings
from elastic.core.sharding.cuts import Box, in_whole
from elastic.core.sharding.layout import Chunk
from elastic.engines.live_state import ShardedState, TensorSpec, buffers, frozen_whole, specs_of
from elastic.engines.model.cuts import Cuts, known_cuts, unknown
from elastic.engines.model.description import aliases
from elastic.engines.model.plain_names import named_buffers, named_parameters
from elastic.interchange.weights import CheckpointWeights, Weights, match_names, open_weights
from elastic.training.state.verify_weights import MASK63

_log = logging.getLogger(__name__)

# Read and cast at once; what is larger is read in pieces.
_PIECE_BYTES = 64 << 20


def install_weights(sharded: ShardedState, settings: WeightsSettings, lanes: Lanes, cuts: Cuts | None) -> None:
    """Parameters and buffers from `settings.source`, cast to the engine's dtypes; the optimizer begins anew.

    Collective; every rank reads its own parts, of whole tensors. Raises on all ranks or on none: ModelMismatch (names
    or shapes differ, the first are named), UsageError (nothing readable there, or slices of which nobody knows where
    they are in the whole), IntegrityError or StorageError. After an error the engine must be thrown away.
    """
    if lanes.slices > 1:
        lanes.every.raise_together(unknown(sharded.module, cuts), "looking at how layers are shared")
    known = known_cuts(cuts)

    def live() -> Iterator[_Live]:
        yield from ((master.tensor, master.chunks) for master in sharded.masters())
        yield from ((extra.tensor, (extra.chunk,)) for extra in [*sharded.frozen(), *buffers(sharded.module)])

    def begin() -> list[TensorSpec]:
        sharded.require_readable()
        return [replace(spec, shape=known[spec.name].shape) if spec.name in known else spec for spec in sharded.specs()]

    def boxes(name: str, start: int, stop: int) -> list[Box]:
        return in_whole(known.get(name), lanes.slice, start, stop)

    _install(begin, sharded.module, live, sharded.begin_install, settings, lanes.every, boxes)
    sharded.finish_install()


def load_whole(model: torch.nn.Module, settings: WeightsSettings, agreement: Agreement) -> None:
    """The same for a model that ranks are about to share layers of: whole, on every rank, cast to the model's dtypes.

    Collective over all ranks; each reads everything. Raises what `install_weights` raises, UsageError for a parameter
    or buffer without values, by name.
    """

    def begin() -> list[TensorSpec]:
        for name, tensor in chain(named_parameters(model), named_buffers(model)):
            # The latter: deepspeed.zero.Init has left a rank's share of it.
            if tensor.is_meta or hasattr(tensor, "ds_id"):
                raise UsageError(
                    f"{name!r} has no values yet (the meta device, or deepspeed.zero.Init), and weights to begin with "
                    "are read into the whole model where ranks share layers: build the model on the CPU"
                )
        return specs_of(model, (), lambda parameter: tuple(parameter.shape))

    def live() -> Iterator[_Live]:
        yield from ((extra.tensor, (extra.chunk,)) for extra in [*frozen_whole(model, ()), *buffers(model)])

    _install(
        begin, model, live, lambda: None, settings, agreement, lambda _, start, stop: in_whole(None, 0, start, stop)
    )


_Result = TypeVar("_Result")
# A live tensor, and which elements of which tensors it has.
_Live = tuple[torch.Tensor, Sequence[Chunk]]


def _install(
    begin: Callable[[], Sequence[TensorSpec]],
    module: torch.nn.Module,
    live: Callable[[], Iterable[_Live]],
    before_first: Callable[[], None],
    settings: WeightsSettings,
    agreement: Agreement,
    boxes: Callable[[str, int, int], Iterable[Box]],
) -> None:
    """Fill what `live` gives, once `begin` has said what there is, and all that must be there was found. `boxes` says
    where elements of what a rank has of a tensor lie in the whole."""
    doing = f"reading the weights in {settings.source}"
    specs, known, weights = _on_all(lambda: (begin(), aliases(module), open_weights(settings)), agreement, doing)
    elsewhere = _of_other_ranks(weights.shapes, {spec.name for spec in specs} | set(known), agreement, settings.source)
    optional = [*elsewhere, *(spec.name for spec in specs if not spec.persistent)]

    def fill() -> int:
        names = match_names({spec.name: spec.shape for spec in specs}, known, optional, weights.shapes, settings)
        before_first()
        for target, name, start in _targets(live()):
            if name in names and target.numel():
                for box in boxes(name, start, start + target.numel()):
                    _fill(target, weights, names[name], box)
        return len(names)

    count = _on_all(fill, agreement, doing)
    if isinstance(weights, CheckpointWeights):
        _verify(weights, agreement, settings.source)
    _log.info("%d tensors were read from %s", count, settings.source)


def _on_all(call: Callable[[], _Result], agreement: Agreement, doing: str) -> _Result:
    """What it gives, once it has given something on all ranks. Collective."""
    error: Exception | None = None
    found: _Result | None = None
    try:
        found = call()
    except Exception as caught:  # noqa: BLE001 - the other ranks wait: they must learn of it, then it is raised
        error = caught
    agreement.raise_together(error, doing)
    assert found is not None
    return found


def _of_other_ranks(
    found: Mapping[str, tuple[int, ...]], own: Collection[str], agreement: Agreement, source: str
) -> list[str]:
    """What is not this rank's of what was found, but another stage's of a pipeline. Collective.

    Raises UsageError where the ranks have found different tensors."""
    names = sorted(found)
    said = repr([(name, tuple(found[name])) for name in names])
    _, (unlike,) = agreement.any_and_unequal([], [xxhash.xxh3_64_intdigest(said.encode()) & MASK63])
    if unlike:
        raise UsageError(f"{source} does not hold the same tensors on all nodes: use a folder that all nodes share")
    nowhere = agreement.least([name not in own for name in names])
    return [name for name, absent in zip(names, nowhere, strict=True) if name not in own and not absent]


def _targets(tensors: Iterable[_Live]) -> Iterator[tuple[torch.Tensor, str, int]]:
    """This rank's memory, in pieces: (1-D live tensor, name, its first element in the whole tensor)."""
    for tensor, chunks in tensors:
        live = tensor.detach()
        flat = live.reshape(-1)
        for chunk in chunks:
            yield flat[chunk.offset : chunk.offset + chunk.numel], chunk.name, chunk.start
        if flat.data_ptr() != live.data_ptr():
            # Not contiguous: the flat one is a copy.
            live.copy_(flat.view(live.shape))


def _fill(target: torch.Tensor, weights: Weights, name: str, box: Box) -> None:
    # What lies between rows is read with them.
    share = box.width / max(box.width, box.source_stride)
    for piece in box.pieces(max(1, int(_PIECE_BYTES // target.element_size() * share))):
        size, begin = (piece.rows, piece.width), target.storage_offset() + piece.target
        target.as_strided(size, (piece.target_stride, 1), begin).copy_(_read(weights, name, piece))


def _read(weights: Weights, name: str, box: Box) -> torch.Tensor:
    """[rows, width]. Of a checkpoint no element that is not needed: how often each was read is verified."""
    if isinstance(weights, CheckpointWeights):
        begins = range(box.source, box.source + box.rows * box.source_stride, box.source_stride)
        return torch.stack([weights.read(name, begin, box.width) for begin in begins])
    return weights.read(name, box.source, box.span).as_strided((box.rows, box.width), (box.source_stride, 1))


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

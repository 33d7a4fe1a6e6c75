"""The model's tensors whole, in the memory of rank 0: of parts that lie on any ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic.comm.lanes import Lanes
from elastic.core.sharding.cuts import Box, Cut, in_whole
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import BUFFER, PARAM, ShardedState
from elastic.engines.model.cuts import Cuts, known_cuts, unknown
from elastic.engines.model.description import aliases
from elastic.engines.model.plain_names import named_buffers, named_parameters


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def gather_whole(
    sharded: ShardedState,
    inventory: Inventory,
    written: RankLayout,
    cuts: Cuts | None,
    lanes: Lanes,
    device: torch.device,
    names: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their names in the plain model, all names of a tied one, on the CPU and in
    the model's dtypes; on other ranks than 0 nothing. `names`: these alone, the same on all ranks. `written` is what
    this rank writes of a snapshot: each element is on one rank. Of stages of a pipeline the tensors of all.

    Collective over all ranks. A tensor at a time is whole on each rank's device. Raises UsageError for slices of which
    nobody knows how they are put together."""
    if lanes.slices > 1:
        lanes.every.raise_together(unknown(sharded.module, cuts), "gathering whole weights")
    known = known_cuts(cuts)
    parts, found = _parts(inventory, written), dict[str, torch.Tensor]()
    for tensor in (each for each in _all(sharded, known, lanes) if names is None or each.name in names):
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        cut = known.get(tensor.name)
        # What is not sliced, the ranks with the first slices have.
        if cut is not None or lanes.slice == 0:
            for chunk, values in parts.get(tensor.name, ()):
                boxes = in_whole(cut, lanes.slice, chunk.start, chunk.stop)
                _put(whole.view(-1), values.to(device, tensor.dtype), boxes)
        # Bytes that others have as zeros: sums of floats would not keep the sign of a zero.
        dist.reduce(whole.view(-1).view(torch.uint8), dst=0)
        if lanes.every.rank == 0:
            found[tensor.name] = whole.cpu()
    if lanes.every.rank == 0:
        others = aliases(sharded.module).items()
        found |= {alias: found[name] for alias, name in others if name in found and (names is None or alias in names)}
    return found


def _all(sharded: ShardedState, cuts: Mapping[str, Cut], lanes: Lanes) -> list[_Tensor]:
    """The tensors of all stages, and experts that are tensors by themselves, in one order on all ranks. Collective."""
    names_some = lanes.slice == 0 and (lanes.leads or sharded.sharing().apart)
    every: list[Sequence[_Tensor]] = [()] * lanes.every.world_size
    dist.all_gather_object(every, list(_own(sharded, cuts)) if names_some else [])
    return list({tensor.name: tensor for own in every for tensor in own}.values())


def _own(sharded: ShardedState, cuts: Mapping[str, Cut]) -> Iterator[_Tensor]:
    dtypes = {name: tensor.dtype for name, tensor in named_buffers(sharded.module)}
    dtypes |= {name: parameter.dtype for name, parameter in named_parameters(sharded.module)}
    for spec in sharded.specs():
        if spec.persistent and spec.name in dtypes:
            cut = cuts.get(spec.name)
            yield _Tensor(spec.name, spec.shape if cut is None else cut.shape, dtypes[spec.name])


def _parts(inventory: Inventory, written: RankLayout) -> Mapping[str, list[tuple[Chunk, torch.Tensor]]]:
    """What this rank gives, by tensor."""
    tensors = {master.buffer: master.tensor for master in inventory.masters}
    tensors |= {extra.chunk.buffer: extra.tensor for extra in inventory.extras if extra.kind in (PARAM, BUFFER)}
    found: dict[str, list[tuple[Chunk, torch.Tensor]]] = {}
    for chunk in written.chunks:
        if (tensor := tensors.get(chunk.buffer)) is not None:
            values = tensor.detach().reshape(-1)[chunk.offset : chunk.offset + chunk.numel]
            found.setdefault(chunk.name, []).append((chunk, values))
    return found


def _put(whole: torch.Tensor, values: torch.Tensor, boxes: Iterable[Box]) -> None:
    """Both are 1-D."""
    for box in boxes:
        size = (box.rows, box.width)
        there = values.as_strided(size, (box.target_stride, 1), values.storage_offset() + box.target)
        whole.as_strided(size, (box.source_stride, 1), whole.storage_offset() + box.source).copy_(there)

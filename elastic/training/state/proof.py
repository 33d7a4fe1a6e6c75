"""The proof after a restore: what now is in the live engine, recomputed and compared with the manifest on all ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from elastic.checkpoint.digest import partial_digests
from elastic.core.errors import IntegrityError
from elastic.core.layout import Piece, RankLayout
from elastic.core.manifest import Manifest
from elastic.training.state.agree import Agreement
from elastic.training.state.inventory import Inventory
from elastic.training.state.live import Master

_SHOWN = 3


@dataclass(frozen=True)
class _Digests:
    """`partial` of slices, to be summed over the ranks; `whole` of replicas, each to be compared by itself."""

    partial: dict[str, int]
    whole: dict[str, int]


def prove(inventory: Inventory, manifest: Manifest, skipped: Collection[str], agreement: Agreement) -> None:
    """Collective. Raises IntegrityError naming the first differing tensors, with the same verdict on every rank."""
    keys = sorted(key for key in manifest.digests if key.split("/", 1)[1] not in skipped)
    local = _digests(inventory)
    sums = agreement.sums([local.partial.get(key, 0) for key in keys])
    wrong = [local.whole.get(key, summed) != manifest.digests[key] for key, summed in zip(keys, sums, strict=True)]
    # The masters may be right and the weights that the next forward pass uses still be old ones.
    wrong += [not _follows(master) for master in inventory.masters]
    keys += [f"the model's own weights of {master.buffer}" for master in inventory.masters]
    failed = [key for key, flag in zip(keys, agreement.any(wrong), strict=True) if flag]
    if failed:
        more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        raise IntegrityError(
            f"what checkpoint {manifest.id} gave back is not what was saved: {', '.join(failed[:_SHOWN])}{more} differ"
        )


def _digests(inventory: Inventory) -> _Digests:
    pieces: dict[str, list[Piece]] = {}
    for piece in inventory.held().pieces:
        pieces.setdefault(piece.buffer, []).append(piece)
    whole_buffers = {m.buffer for m in inventory.masters if m.replicated}
    whole_buffers |= {e.piece.buffer for e in inventory.extras if e.replicated}
    found = _Digests({}, {})
    for key, tensor in inventory.tensors().items():
        buffer = key.split("/", 1)[1]
        # One at a time, so that the device's state is never on the host twice.
        host = tensor.detach().reshape(-1).cpu()
        values = partial_digests(RankLayout(tuple(pieces.get(buffer, ())), {buffer: host.numel()}), {key: host})
        (found.whole if buffer in whole_buffers else found.partial).update(values)
    return found


def _follows(master: Master) -> bool:
    """Are the model's weights the master's values in the model's dtype, bit for bit?"""
    if master.weights is None or not master.pieces:
        return True
    expected = master.tensor.detach().reshape(-1).to(device=master.weights.device, dtype=master.weights.dtype)
    return torch.equal(expected.view(torch.uint8), master.weights.detach().contiguous().view(torch.uint8))

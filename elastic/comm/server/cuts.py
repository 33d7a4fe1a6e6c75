"""Consistent cuts of a parameter server in storage: every shard after the same update, and which samples are in it.

`<folder>/v<version>/shard-<number>` has the tensors of a shard one after the other; `manifest.json` is written last,
and a cut without it does not exist. A run may continue on another number of servers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import xxhash

from elastic.comm.server.requests import ReadCut, as_bytes, hash_of, listed
from elastic.comm.server.shard import Group, Shard, ShardSpec, fresh, joined, part_of
from elastic.comm.server.shard_client import ShardClient
from elastic.core.errors import IntegrityError
from elastic.core.server.global_batches import Batches, Cut, begin
from elastic.core.server.placement import flat_ranges
from elastic.store.objects import Objects

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Saved:
    """A cut as it was read. `whole` has the tensors of the optimizer's groups over the whole vector, by
    "<group>/<key>"."""

    cut: Cut
    batches: dict[str, int]
    spec: ShardSpec
    whole: dict[str, torch.Tensor]

    def shards(self, count: int) -> list[Shard]:
        """The state for so many servers."""
        numbers = self.spec.groups[-1].end
        specs = [replace(self.spec, begin=start, end=end) for start, end in flat_ranges(numbers, count)]
        return [
            fresh(spec, self.cut.version, self.cut.next_micro, self.cut.missing, part_of(spec, self.whole))
            for spec in specs
        ]

    def begun(self) -> Batches:
        """The rules' state from which the run continues; members are to be told."""
        return begin(**self.batches, cut=self.cut)


def save(client: ShardClient, specs: tuple[ShardSpec, ...], objects: Objects, folder: str) -> Cut | None:
    """Write the newest cut; None where there is none yet. Raises CollectiveFailed where newer ones have replaced it."""
    state = client.batches()
    if not state.cuts:
        return None
    cut = state.cuts[-1]
    home = f"{folder}/v{cut.version:08d}"

    def one(shard: int) -> dict[str, Any]:
        _, tensors = client.ask(shard, lambda epoch: ReadCut(shard, epoch, cut.version, state.batches))
        chunks = [as_bytes(tensor) for tensor in tensors.values()]
        objects.put(f"{home}/shard-{shard}", chunks)
        return {"tensors": listed(tensors), "xxh3": hash_of(tensors.values())}

    shards = client.each(one)
    kept = {name: getattr(state, name) for name in ("micros", "staleness", "total", "cut_every")}
    manifest = {"cut": asdict(cut), "batches": kept, "spec": asdict(specs[0]), "shards": shards}
    objects.put(f"{home}/{_MANIFEST}", [json.dumps(manifest).encode()])
    return cut


def load(objects: Objects, folder: str) -> Saved | None:
    """The newest cut; None where there is none. Raises IntegrityError where its bytes are not those that were saved."""
    complete = [name for name in objects.names(folder) if _MANIFEST in objects.names(f"{folder}/{name}")]
    if not complete:
        return None
    home = f"{folder}/{complete[-1]}"
    manifest = json.loads(objects.get(f"{home}/{_MANIFEST}"))
    parts: list[tuple[str, torch.Tensor]] = []
    for number, shard in enumerate(manifest["shards"]):
        data = objects.get(f"{home}/shard-{number}")
        if xxhash.xxh3_64_hexdigest(data) != shard["xxh3"]:
            raise IntegrityError(f"{home}/shard-{number} is not as it was saved")
        flat = torch.frombuffer(bytearray(data), dtype=torch.float32)
        at = 0
        for name, numel in shard["tensors"]:
            parts.append((name, flat[at : at + numel]))
            at += numel
    spec = manifest["spec"]
    groups = tuple(Group(**group) for group in spec.pop("groups"))
    rates = tuple(spec.pop("rates"))
    cut = manifest["cut"]
    return Saved(
        Cut(cut["version"], cut["next_micro"], tuple(cut["missing"])),
        manifest["batches"],
        ShardSpec(**spec, groups=groups, rates=rates),
        joined(parts),
    )

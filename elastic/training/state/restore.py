"""One restore: each rank reads what it needs of a checkpoint, and when all have it, all install it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from elastic.checkpoint.shares import Shares
from elastic.checkpoint.source import CheckpointSource
from elastic.comm.agreement import Agreement
from elastic.comm.lanes import Lanes
from elastic.core.checkpoint.lanes import are_cut_otherwise, lane_of
from elastic.core.checkpoint.manifest import Json, Manifest
from elastic.core.checkpoint.recut import Recut
from elastic.core.checkpoint.stages import part_of
from elastic.core.errors import ModelMismatch
from elastic.engines.base import Engine
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import KEPT, ShardedState
from elastic.engines.model.cuts import Cuts
from elastic.engines.model.plain_names import named_modules
from elastic.engines.optimizer.state import decode_scalars, install_state, scalars_of
from elastic.training.state import late_buffers
from elastic.training.state.extra_state import check_extra, extra_of, install_extra
from elastic.training.state.model_check import check_model
from elastic.training.state.reading import Staged, check_dtypes, kept_in, read_checkpoint
from elastic.training.state.recut.reading import Made, Seen, read_recut
from elastic.training.state.recut.verdict import expected_digests, require_whole
from elastic.training.state.verification import own_digests


class Restore:
    """1. `read`, by all ranks together; 2. `install`, likewise. Each raises on all ranks or on none.

    `cuts`: where ranks share layers, how; None: not known. `built`: the model's buffers as it was built, by name.
    After `read`: `kept` is what the checkpoint has besides the model's tensors and the optimizer's, `recut` how slices
    lie in it where they are others than these, and `expected` the digests of what this rank's place must have.
    """

    def __init__(
        self,
        engine: Engine,
        sharded: ShardedState,
        lanes: Lanes,
        shares: Shares,
        cuts: Cuts | None,
        built: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._engine, self._sharded, self._lanes, self._agreement = engine, sharded, lanes, lanes.every
        self._shares, self._cuts, self._built = shares, cuts, built
        self.kept: Mapping[str, torch.Tensor] = {}
        self.recut: Recut | None = None
        self.expected: Mapping[str, int] = {}
        self._staged: Staged | None = None
        # Of the model's tensors: those that the checkpoint has not, rightly.
        self._skipped: frozenset[str] = frozenset()
        # Of all lanes, as it was read.
        self._saved: Manifest | None = None
        # Of a recut: what was read, by its numbers there and here.
        self._seen: Seen = {}
        self._made: Made = {}
        # Of the checkpoint's tensors: does this stage of a pipeline not have it?
        self._foreign: tuple[tuple[str, bool], ...] = ()

    @property
    def staged(self) -> Staged:
        assert self._staged is not None, "nothing was read"
        return self._staged

    def read(self, source: CheckpointSource, checkpoint_id: str) -> None:
        """All that this rank needs; nothing is installed. Raises ModelMismatch (another model: the first difference is
        named), StorageError or IntegrityError."""
        error: Exception | None = None
        try:
            self._read(source, checkpoint_id)
        except Exception as caught:  # noqa: BLE001 - the other ranks wait: they must learn of it, then it is raised
            error = caught
        self._agreement.raise_together(error, f"reading checkpoint {checkpoint_id}")
        # The list is of the checkpoint, and the same on all ranks: what every stage lacks, the model has not.
        absent = self._agreement.least([has_not for _, has_not in self._foreign])
        for (name, _), nowhere in zip(self._foreign, absent, strict=True):
            if nowhere:
                raise ModelMismatch(f"the checkpoint is of another model: it has {name!r}, no stage of this model has")
        self.expected = self._expected()

    def install(self) -> None:
        """After a failure the engine must be thrown away."""
        error: Exception | None = None
        try:
            self._install()
        except Exception as caught:  # noqa: BLE001 - as above: what follows is collective
            error = caught
        self._agreement.raise_together(error, f"installing checkpoint {self.staged.manifest.id}")
        self._sharded.finish_install()

    @property
    def groups(self) -> Json:
        """The optimizer's hyper-parameters as they were saved."""
        return self.staged.manifest.extra_state["optimizer"]["groups"]

    def _expected(self) -> Mapping[str, int]:
        """Collective where slices are others than those that were saved: raises IntegrityError on all ranks if what
        they have read is not that."""
        assert self._saved is not None
        if self.recut is None:
            return own_digests(self._saved, self._agreement.rank)
        require_whole(self.recut, self._seen, self._skipped, self._agreement)
        once = self._sharded.once
        shards = self._lanes.own if once is None else Agreement(once, self._engine.device)
        return expected_digests(self.recut, self.staged.manifest, self._made, self._sharded.zero_stage, shards)

    def _cut_alike(self, saved: Manifest) -> bool:
        """Has each lane what it had? As many lanes have other slices of experts where these were not shared, or by
        another number of ranks."""
        slices = self._lanes.slices
        if saved.tp != slices or are_cut_otherwise(saved, self._cuts):
            return False
        shapes = lane_of(saved, self._lanes.slice).parameters
        found = [
            (math.prod(shapes.get(spec.name, spec.shape)), math.prod(spec.shape)) for spec in self._sharded.specs()
        ]
        unlike = [sizes for sizes in found if sizes[0] != sizes[1]]
        # Else it is another model, as is said of it below.
        return not unlike or any(max(sizes) != min(sizes) * slices for sizes in unlike)

    def _own_part(self, manifest: Manifest) -> Manifest:
        """What this stage restores of a checkpoint of the whole model."""
        extra = extra_of(manifest)
        modules = {name for name, _ in named_modules(self._sharded.module)}
        names = {spec.name for spec in self._sharded.specs()}
        names |= {name for name in manifest.parameters if f"{KEPT}/{name}" in manifest.digests}
        names |= {name for name in extra.get("grown_buffers", {}) if name.rpartition(".")[0] in modules}
        fleeting = set(extra["fleeting_buffers"])
        self._foreign = tuple((name, name not in names) for name in manifest.parameters if name not in fleeting)
        return part_of(manifest, names, modules)

    def _read(self, source: CheckpointSource, checkpoint_id: str) -> None:
        self._sharded.require_readable()
        self._saved = source.manifest(checkpoint_id)
        lanes = self._lanes
        self.recut = (
            None if self._cut_alike(self._saved) else Recut.of(self._saved, self._cuts, lanes.slice, lanes.slices)
        )
        manifest = lane_of(self._saved, lanes.slice) if self.recut is None else self.recut.manifest
        if lanes.stages > 1:
            manifest = self._own_part(manifest)
        saved = extra_of(manifest)
        late_buffers.adopt(self._engine.module, manifest, saved.get("grown_buffers", {}), self._built)
        self._skipped = check_model(manifest, self._sharded.specs(), saved["fleeting_buffers"])
        check_extra(self._engine, self._sharded, saved)
        self.kept = kept_in(manifest, self._shares)
        inventory = self._inventory()
        if self.recut is None:
            self._staged = read_checkpoint(source, manifest, inventory, self._sharded.rank)
        else:
            self._staged, self._seen, self._made = read_recut(
                source, self.recut, manifest, inventory, self._sharded.rank
            )
        check_dtypes(inventory.masters, inventory.extras, self.staged)
        by_name = decode_scalars(saved["optimizer"]["scalars"])
        for master in inventory.masters:
            scalars_of(master, by_name)

    def _install(self) -> None:
        sharded, staged = self._sharded, self.staged
        saved = staged.manifest.extra_state
        sharded.begin_install()
        install_extra(self._engine, sharded, saved)
        by_name = decode_scalars(saved["optimizer"]["scalars"])
        inventory = self._inventory()
        # First: a part of what the optimizer keeps is in `kept`.
        for extra in inventory.extras:
            live = extra.tensor.detach()
            live.copy_(staged.extra(extra).view(live.shape))
        for master in inventory.masters:
            live = master.tensor.detach()
            live.copy_(staged.master(master).view(live.shape))
            install_state(sharded.base, master, staged.states(master), scalars_of(master, by_name), self.kept)

    def _inventory(self) -> Inventory:
        inventory = Inventory.of(self._sharded)
        extras = tuple(extra for extra in inventory.extras if extra.chunk.name not in self._skipped)
        return Inventory(inventory.masters, inventory.states, extras).with_kept(self.kept)

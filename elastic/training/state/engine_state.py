"""The state of one live engine: snapshot out, restore in."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from time import monotonic
from typing import Any

import torch

from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.comm.agreement import Agreement
from elastic.core.checkpoint.manifest import Json, Manifest, ShardRecord, StoredTensor
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import IntegrityError
from elastic.core.names import shard_file
from elastic.core.sharding.layout import RankLayout
from elastic.engines.deepspeed.state.unsupported import refuse_moved_away
from elastic.engines.inventory import Inventory, gaps
from elastic.engines.live_state import BUFFER, PARAM, Member, Stage, members
from elastic.engines.optimizer_state import decode_scalars, install_state, scalars_of
from elastic.training.session import RestoreReport
from elastic.training.state.dtypes import check_dtype
from elastic.training.state.extra_state import check_client, install_client, read_client
from elastic.training.state.host import HostCopy, HostPool, Transfer, packed, placed, transfer
from elastic.training.state.model_check import check_model
from elastic.training.state.reading import Staged, check_dtypes, read_checkpoint
from elastic.training.state.verification import Proof, prove_place, prove_replicas
from elastic.training.state.verify_scalars import LiveGroups

_log = logging.getLogger(__name__)


class LiveState:
    """`EngineState` of a DeepSpeed engine whose stage is described by `stage`."""

    def __init__(self, engine: Any, stage: Stage) -> None:
        self._engine = engine
        self._stage = stage
        self._pool = HostPool(engine.device)
        self._agreement = Agreement(engine, stage.rank, stage.world_size)
        self._proof: Proof | None = None
        inventory = self._inventory()
        for key, tensor in inventory.tensors().items():
            check_dtype(key, tensor.dtype)
        # A scheduler or optimizer that cannot be carried is refused now, not at the first snapshot.
        read_client(engine, stage, inventory, {})
        self.zero_stage = stage.zero_stage
        self.layout: RankLayout = inventory.sharded()

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        return {member.name: member.shape for member in self._members()}

    def snapshot(self, *, run_id: str, generation: int, step: int, client: Mapping[str, Json]) -> ShardSnapshot:
        snapshot, copies = self.capture(run_id=run_id, generation=generation, step=step, client=client)
        copies.run()
        return snapshot

    def capture(
        self, *, run_id: str, generation: int, step: int, client: Mapping[str, Json]
    ) -> tuple[ShardSnapshot, Transfer]:
        inventory, layout, wanted = self._wanted()
        tensors, copies = self._pool.prepare(wanted)
        snapshot = ShardSnapshot(
            run_id=run_id,
            generation=generation,
            rank=self._stage.rank,
            world_size=self._stage.world_size,
            step=step,
            zero_stage=self.zero_stage,
            layout=layout,
            tensors=tensors,
            parameters=self.parameters,
            client=self._client(inventory, client),
        )
        return snapshot, copies

    def record(self, generation: int) -> tuple[ShardRecord, int]:
        _, layout, wanted = self._wanted()
        begins, size = packed(wanted)
        rank, world_size = self._stage.rank, self._stage.world_size
        tensors = tuple(
            StoredTensor(item.key, DTYPE_NAMES[item.source.dtype], item.source.numel(), begin)
            for item, begin in zip(wanted, begins, strict=True)
        )
        record = ShardRecord(
            rank=rank,
            world_size=world_size,
            generation=generation,
            step=0,
            file=shard_file(rank, world_size),
            bytes=size,
            xxh3="",
            tensors=tensors,
            chunks=layout.chunks,
            digests={},
            zero_stage=self.zero_stage,
            parameters=self.parameters if rank == 0 else None,
        )
        return record, size

    def capture_into(
        self, memory: torch.Tensor, record: ShardRecord, client: Mapping[str, Json]
    ) -> tuple[Mapping[str, Json] | None, Transfer] | None:
        inventory, _, wanted = self._wanted()
        shapes = [(item.key, DTYPE_NAMES[item.source.dtype], item.source.numel()) for item in wanted]
        if shapes != [(tensor.key, tensor.dtype, tensor.numel) for tensor in record.tensors]:
            return None
        targets = placed(wanted, [tensor.begin for tensor in record.tensors], memory)
        return self._client(inventory, client), transfer(wanted, targets)

    def _wanted(self) -> tuple[Inventory, RankLayout, list[HostCopy]]:
        """What this rank's part of a snapshot is copied from, now."""
        self.proven()
        refuse_moved_away(self._engine)
        inventory = self._inventory()
        layout = inventory.written(self._stage.rank, self._stage.world_size)
        padding = gaps(layout)
        wanted = []
        for key, tensor in inventory.tensors().items():
            kind, buffer = key.split("/", 1)
            if buffer in layout.buffers:
                # A forward pass changes module buffers, and the user's own code may change frozen parameters (an
                # average of the weights, say), in stage 0 the masters, too.
                at_once = kind in (BUFFER, PARAM) or self.zero_stage == 0
                wanted.append(HostCopy(key, tensor, padding[buffer], at_once))
        return inventory, layout, wanted

    def _client(self, inventory: Inventory, caller: Mapping[str, Json]) -> Mapping[str, Json] | None:
        return read_client(self._engine, self._stage, inventory, caller) if self._stage.rank == 0 else None

    def restore(
        self, source: CheckpointSource, checkpoint_id: str, later: bool = False
    ) -> tuple[RestoreReport, Mapping[str, Json]]:
        began = monotonic()
        staged, skipped = self._read_together(source, checkpoint_id)
        read = monotonic()
        groups = LiveGroups.of(self._engine)
        self._install_together(staged, skipped)
        installed = monotonic()
        self._proof = Proof(self._engine, self._stage, self._without(skipped), staged.manifest, skipped, groups)
        if later:
            self._before_first_step()
        else:
            self.proven()
        report = RestoreReport(
            checkpoint=checkpoint_id,
            source=source.name,
            step=staged.manifest.step,
            bytes_read=staged.bytes_read,
            bytes_needed=staged.bytes_needed,
            read_s=read - began,
            install_s=installed - read,
            verify_s=monotonic() - installed,
        )
        _log.info("restored %s at world size %d: %s", checkpoint_id, self._stage.world_size, report)
        return report, staged.manifest.client["caller"]

    def proven(self) -> None:
        if self._proof is not None:
            # Kept when it fails: whoever goes on all the same is told again.
            self._proof.verdict(self._agreement)
            self._proof = None

    def close(self) -> None:
        if self._proof is not None:
            self._proof.stop()
        self._pool.close()

    def prove_place(
        self, saved: Mapping[str, Json], here: Mapping[str, Json], plan: StepPlan, order: SampleOrder
    ) -> None:
        prove_place(saved, here, plan, order, self._agreement)

    def prove_replicas(self) -> None:
        if self._stage.world_size > 1:
            prove_replicas(self._stage, self._inventory(), self._agreement)

    def _before_first_step(self) -> None:
        """Whatever DeepSpeed does to masters goes through the base optimizer's step."""
        # Whoever keeps the optimizer must not keep the engine with it.
        state = weakref.ref(self)

        def prove_first(*_: Any) -> None:
            live = state()
            if live is not None:
                live.proven()

        self._stage.base.register_step_pre_hook(prove_first)

    def _read_together(self, source: CheckpointSource, checkpoint_id: str) -> tuple[Staged, frozenset[str]]:
        """Until all ranks have all they need in host memory, nothing is installed on any."""
        found: tuple[Staged, frozenset[str]] | None = None
        error: Exception | None = None
        try:
            found = self._read(source, checkpoint_id)
        except Exception as caught:  # noqa: BLE001 - the other ranks wait: they must learn of it, then it is raised
            error = caught
        self._agreement.raise_together(error, f"reading checkpoint {checkpoint_id}")
        assert found is not None
        return found

    def _read(self, source: CheckpointSource, checkpoint_id: str) -> tuple[Staged, frozenset[str]]:
        refuse_moved_away(self._engine)
        manifest = source.manifest(checkpoint_id)
        client = _client_of(manifest)
        skipped = check_model(manifest, self._members(), client["fleeting_buffers"])
        check_client(self._engine, self._stage, client)
        inventory = self._without(skipped)
        staged = read_checkpoint(source, manifest, inventory.held(), inventory.masters, self._stage.rank)
        check_dtypes(inventory.masters, inventory.extras, staged)
        by_name = decode_scalars(client["optimizer"]["scalars"])
        for master in inventory.masters:
            scalars_of(master, by_name)
        return staged, skipped

    def _install_together(self, staged: Staged, skipped: frozenset[str]) -> None:
        error: Exception | None = None
        try:
            self._install(staged, skipped)
        except Exception as caught:  # noqa: BLE001 - as above: what follows is collective
            error = caught
        self._agreement.raise_together(error, f"installing checkpoint {staged.manifest.id}")
        self._stage.finish_install()

    def _install(self, staged: Staged, skipped: frozenset[str]) -> None:
        stage, client = self._stage, staged.manifest.client
        stage.begin_install()
        install_client(self._engine, stage, client)
        by_name = decode_scalars(client["optimizer"]["scalars"])
        inventory = self._without(skipped)
        for master in inventory.masters:
            live = master.tensor.detach()
            live.copy_(staged.master(master).view(live.shape))
            install_state(stage, master, staged.states(master), scalars_of(master, by_name))
        for extra in inventory.extras:
            live = extra.tensor.detach()
            live.copy_(staged.extra(extra).view(live.shape))

    def _inventory(self) -> Inventory:
        return Inventory.of(self._stage, self._engine.module)

    def _without(self, skipped: frozenset[str]) -> Inventory:
        inventory = self._inventory()
        kept = tuple(extra for extra in inventory.extras if extra.chunk.name not in skipped)
        return Inventory(inventory.masters, inventory.states, kept)

    def _members(self) -> list[Member]:
        return members(self._engine.module, [name for group in self._stage.groups() for name in group])


def _client_of(manifest: Manifest) -> Mapping[str, Json]:
    missing = {"engine", "optimizer", "loss_scaler", "scheduler", "fleeting_buffers", "caller"} - set(manifest.client)
    if missing:
        raise IntegrityError(f"checkpoint {manifest.id} lacks the client state {sorted(missing)}")
    return manifest.client

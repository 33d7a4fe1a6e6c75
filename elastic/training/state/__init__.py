"""The sharded state of a live DeepSpeed engine: described, copied to host memory, installed at another world size.

Everything is keyed by the tensors' names, so a checkpoint of one ZeRO stage and world size can be installed into any
other. torch and DeepSpeed 0.19.8; no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.comm.agreement import Agreement
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan
from elastic.core.sharding.layout import RankLayout
from elastic.engines.deepspeed.state.layout_check import check_layout
from elastic.engines.deepspeed.state.partitioned import PartitionedStage
from elastic.engines.deepspeed.state.replicated import ReplicatedStage
from elastic.engines.deepspeed.state.stage3 import Stage3
from elastic.engines.deepspeed.state.unsupported import refuse_unsupported
from elastic.engines.live_state import Stage, rank_in
from elastic.engines.optimizer_trial import try_optimizer
from elastic.training.session import RestoreReport
from elastic.training.state.engine_state import LiveState
from elastic.training.state.host import Transfer

__all__ = ["EngineState", "open_state"]


class EngineState(Protocol):
    """Called from the training thread only, between optimizer steps.

    1. `restore` at most once, before the first step, by all ranks together
    2. `snapshot` after any step, by any rank by itself
    3. `close` when the engine goes: nobody reads its tensors any more
    """

    zero_stage: int
    # What this rank alone holds; empty in stage 0.
    layout: RankLayout

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Every carried tensor's name -> full shape: parameters in the model's order, then buffers."""
        ...

    def snapshot(self, *, run_id: str, generation: int, step: int, client: Mapping[str, Json]) -> ShardSnapshot:
        """A copy of this rank's state in host memory; `client` (JSON) comes back from `restore`. Not collective.

        Of replicated tensors each is carried by one rank; module buffers by rank 0, whose values are the run's. The
        snapshot owns its memory, which is used again only when no tensor of it is left.
        """
        ...

    def capture(
        self, *, run_id: str, generation: int, step: int, client: Mapping[str, Json]
    ) -> tuple[ShardSnapshot, Transfer]:
        """The same, with tensors still to be filled: the Transfer must run before the next optimizer step."""
        ...

    def record(self, generation: int) -> tuple[ShardRecord, int]:
        """The record of this rank's part as it would lie in memory of this many bytes, without a step or digests.

        It stays the same from step to step, unless the optimizer begins to keep more.
        """
        ...

    def capture_into(
        self, memory: torch.Tensor, record: ShardRecord, client: Mapping[str, Json]
    ) -> tuple[Mapping[str, Json] | None, Transfer] | None:
        """Fill `memory` (1-D uint8) as `record` says: rank 0's client and the Transfer; None if it no longer fits."""
        ...

    def restore(
        self, source: CheckpointSource, checkpoint_id: str, later: bool = False
    ) -> tuple[RestoreReport, Mapping[str, Json]]:
        """Read this rank's part of a checkpoint of any world size and stage, install it, prove it. Collective.

        Returns the times and the `client` of the snapshot. Raises on all ranks or on none: ModelMismatch (another
        model: the first difference is named), StorageError, IntegrityError. Until all ranks have read all they need,
        nothing is installed; after a failed proof the engine must be thrown away.

        `later`: masters and optimizer state are read again on a thread, beside the first forward and backward pass,
        and the verdict falls before the first optimizer step changes anything, which raises what this would have
        raised. All else is looked at before this returns, and judged with it.
        """
        ...

    def proven(self) -> None:
        """The verdict on a restore that was to be proven `later`. Collective until it has fallen, then nothing.

        Called by the first optimizer step and the first snapshot; raises again each time when the proof has failed.
        """
        ...

    def prove_place(
        self, saved: Mapping[str, Json], here: Mapping[str, Json], plan: StepPlan, order: SampleOrder
    ) -> None:
        """After `restore`, when the step and the user's state are set: does the run go on where `saved` was taken?

        `saved` is the client that `restore` gave back, `here` the one that would be saved now. Collective; raises
        IntegrityError on all ranks.
        """
        ...

    def prove_replicas(self) -> None:
        """Before a snapshot: are the ranks' copies of whatever is not partitioned equal? Collective.

        Raises IntegrityError on all ranks: a snapshot would carry one copy and a restore would give it to all.
        """
        ...

    def close(self) -> None: ...


def open_state(engine: Any) -> EngineState:
    """The state of `engine`, a DeepSpeedEngine before or after any number of steps.

    Raises UsageError for what cannot be carried to another world size (named, with the reason) and for a DeepSpeed
    whose partitioning is not the one that the pure layouts follow. Collective: on all ranks or on none.
    """
    found: EngineState | None = None
    error: Exception | None = None
    try:
        found = _opened(engine)
    except Exception as caught:  # noqa: BLE001 - the other ranks go on to collectives: they must learn of it
        error = caught
    Agreement(engine, *rank_in(engine.seq_data_parallel_group)).raise_together(error, "looking at the engine")
    assert found is not None
    return found


def _opened(engine: Any) -> EngineState:
    refuse_unsupported(engine)
    stage = _stage_of(engine)
    check_layout(stage)
    try_optimizer(stage.base, stage.zero_stage > 0)
    return LiveState(engine, stage)


def _stage_of(engine: Any) -> Stage:
    match int(engine.zero_optimization_stage()):
        case 3:
            return Stage3(engine)
        case 1 | 2:
            return PartitionedStage(engine)
        case _:
            return ReplicatedStage(engine)

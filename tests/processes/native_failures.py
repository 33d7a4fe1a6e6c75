"""Cases of restores that must not succeed, and of engines that must be refused. Each is (rank, folder) -> None."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from native_case import CALLER, join, leave, save_checkpoint
from native_full import full_tensors
from native_model import Setup, make_engine, train_step

_SETUP = Setup(2)
_WORLD = 2


class FailingSource:
    """The real store, except that one rank cannot read."""

    def __init__(self, store: Any, fails: bool) -> None:
        self.name = store.name
        self._store = store
        self._fails = fails

    def manifest(self, checkpoint_id: str) -> Any:
        return self._store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Sequence[Any]) -> Any:
        from elastic.core.errors import StorageError

        if self._fails:
            raise StorageError("the bucket is away")
        return self._store.read(manifest, ranges)


def one_rank_cannot_read(rank: int, folder: Path) -> None:
    """All ranks raise, nothing was installed on any, and the next attempt works."""
    from deepspeed_ranks import open_state

    from elastic.core.errors import StorageError

    with _saved(rank, folder, "one-cannot-read") as (engine, store, checkpoint):
        if engine is None:
            return
        train_step(engine, 50)
        before = full_tensors(engine, _SETUP)
        hyper = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups])
        state = open_state(engine)
        message = _raised(StorageError, state, FailingSource(store, fails=rank == 1), checkpoint)
        assert ("the bucket is away" in message) == (rank == 1), message
        assert "rank 1" in message or rank == 1, message
        after = full_tensors(engine, _SETUP)
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert hyper == [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
        assert state.restore(store, checkpoint)[1] == CALLER


def corrupt_shard(rank: int, folder: Path) -> None:
    """One flipped bit in one rank's file: the same verdict on all ranks, naming the tensor."""
    from deepspeed_ranks import open_state

    from elastic.core.errors import IntegrityError

    with _saved(rank, folder, "corrupt") as (engine, store, checkpoint):
        if engine is None:
            return
        if rank == 0:
            shard = store.manifest(checkpoint).shards[1]
            tensor = next(tensor for tensor in shard.tensors if tensor.key == "exp_avg/group0")
            path = folder / "corrupt" / "checkpoints" / checkpoint / shard.file
            with path.open("r+b") as file:
                file.seek(tensor.begin + 5)
                byte = file.read(1)
                file.seek(tensor.begin + 5)
                file.write(bytes([byte[0] ^ 4]))
        torch.distributed.barrier()
        message = _raised(IntegrityError, open_state(engine), store, checkpoint)
        assert "exp_avg/" in message, message


def another_model(rank: int, folder: Path) -> None:
    """The first differing tensor is named: another shape, another role, another group, one that is missing."""
    from deepspeed_ranks import open_state

    from elastic.core.errors import ModelMismatch

    with _saved(rank, folder, "another-model") as (engine, store, checkpoint):
        if engine is None:
            return
        module = engine.module
        module.drift.mean = torch.zeros(3)
        assert "'drift.mean' has shape (3,)" in _raised(ModelMismatch, open_state(engine), store, checkpoint)
        module.drift.mean = torch.zeros(7)
        module.drift.register_buffer("extra", torch.zeros(2))
        assert "'drift.extra'" in _raised(ModelMismatch, open_state(engine), store, checkpoint)
        del module.drift.extra
        frozen, module.frozen_one = module.frozen_one, None
        assert "'frozen_one'" in _raised(ModelMismatch, open_state(engine), store, checkpoint)
        module.frozen_one = frozen
        groups = engine.optimizer.bit16_groups
        scheduler, engine.lr_scheduler = engine.lr_scheduler, None
        assert "scheduler" in _raised(ModelMismatch, open_state(engine), store, checkpoint)
        engine.lr_scheduler = scheduler
        assert engine.optimizer.bit16_groups is groups
        assert open_state(engine).restore(store, checkpoint)[1] == CALLER


def caches_may_differ(rank: int, folder: Path) -> None:
    """A buffer outside the state_dict that has grown is left to the module; everything else is restored."""
    from deepspeed_ranks import open_state

    with _saved(rank, folder, "caches") as (engine, store, checkpoint):
        if engine is None:
            return
        engine.module.drift.cache = torch.full((5,), 9.0)
        open_state(engine).restore(store, checkpoint)
        assert torch.equal(engine.module.drift.cache, torch.full((5,), 9.0))
        assert int(engine.module.drift.count) == 2


def nothing_stays_nothing(rank: int, folder: Path) -> None:
    """State saved before a first step has no optimizer state, and takes away what the target engine has."""
    from deepspeed_ranks import open_state

    for stage in (0, 1, 3):
        setup = Setup(stage, "sgd")
        if rank >= _WORLD:
            continue
        join(folder, f"nothing-{stage}", rank, _WORLD)
        engine = make_engine(setup, _WORLD, seed=1)
        checkpoint = save_checkpoint(engine, folder, f"nothing-{stage}", 0, CALLER)
        wanted = [train_step(engine, step) for step in range(3)]
        _restore(engine, folder, f"nothing-{stage}", checkpoint)
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        assert not any(base.state.values())
        assert (engine.global_steps, engine.global_samples) == (0, 0)
        assert [train_step(engine, step) for step in range(3)] == wanted
        open_state(engine)
        leave(engine)


def objects_stay_the_same(rank: int, folder: Path) -> None:
    """Schedulers keep pointing at the groups; no two groups share a step count; a rate changed by hand comes back."""
    with _saved(rank, folder, "objects") as (engine, _, checkpoint):
        if engine is None:
            return
        groups = list(engine.optimizer.param_groups)
        flats = list(engine.optimizer.single_partition_of_fp32_groups)
        moments = [engine.optimizer.optimizer.state[flat]["exp_avg"] for flat in flats]
        wanted = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 7.0
        _restore(engine, folder, "objects", checkpoint)
        base = engine.optimizer.optimizer
        assert all(one is other for one, other in zip(groups, engine.lr_scheduler.optimizer.param_groups, strict=True))
        assert all(one is other for one, other in zip(groups, base.param_groups, strict=True))
        assert [group["lr"] for group in groups] == wanted
        assert all(base.state[flat]["exp_avg"] is moment for flat, moment in zip(flats, moments, strict=True))
        steps = [base.state[flat]["step"] for flat in flats]
        assert len({step.data_ptr() for step in steps}) == len(steps)
        assert all(step.item() == 2.0 for step in steps)


def refused(rank: int, folder: Path) -> None:
    """Optimizers, schedulers and partitionings that cannot be carried are refused when the state is opened."""
    from deepspeed_ranks import open_state

    from elastic.core.errors import UsageError

    if rank > 0:
        return
    join(folder, "refused", 0, 1)
    engine = make_engine(_SETUP, 1, seed=1)
    train_step(engine, 0)
    base = engine.optimizer.optimizer
    flat = engine.optimizer.single_partition_of_fp32_groups[0]

    base.state[flat]["preconditioner"] = torch.zeros(4)
    assert "'preconditioner'" in _refusal(UsageError, open_state, engine)
    base.state[flat]["preconditioner"] = [torch.zeros(4)]
    assert "AdamW" in _refusal(UsageError, open_state, engine)
    del base.state[flat]["preconditioner"]

    # Small tensors are carried as JSON.
    base.param_groups[1]["weights"] = torch.zeros(5000)
    assert "parameter group 1: weights" in _refusal(UsageError, open_state, engine)
    del base.param_groups[1]["weights"]

    engine.lr_scheduler.hook = lambda: None
    assert "MultiStepLR.hook" in _refusal(UsageError, open_state, engine)
    del engine.lr_scheduler.hook

    engine.optimizer.round_robin_bit16_offsets[0][3] += 2
    assert "partitions differently" in _refusal(UsageError, open_state, engine)
    engine.optimizer.round_robin_bit16_offsets[0][3] -= 2

    open_state(engine)
    leave(engine)


@contextmanager
def _saved(rank: int, folder: Path, name: str) -> Iterator[tuple[Any, Any, str]]:
    """An engine of two ranks after two steps, its store and its checkpoint; (None, None, "") on other ranks."""
    from elastic.checkpoint.storage import CheckpointStore

    if rank >= _WORLD:
        yield None, None, ""
        return
    join(folder, name, rank, _WORLD)
    engine = make_engine(_SETUP, _WORLD, seed=1)
    for step in range(2):
        train_step(engine, step)
    checkpoint = save_checkpoint(engine, folder, name, 2, CALLER)
    yield engine, CheckpointStore(folder.as_uri(), name), checkpoint
    leave(engine)


def _restore(engine: Any, folder: Path, name: str, checkpoint: str) -> None:
    from deepspeed_ranks import open_state

    from elastic.checkpoint.storage import CheckpointStore

    open_state(engine).restore(CheckpointStore(folder.as_uri(), name), checkpoint)


def _raised(kind: type[Exception], state: Any, source: Any, checkpoint: str) -> str:
    return _refusal(kind, state.restore, source, checkpoint)


def _refusal(kind: type[Exception], call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"expected a {kind.__name__}")


CASES = {
    run.__name__.replace("_", "-"): run
    for run in (
        one_rank_cannot_read,
        corrupt_shard,
        another_model,
        caches_may_differ,
        nothing_stays_nothing,
        objects_stay_the_same,
        refused,
    )
}

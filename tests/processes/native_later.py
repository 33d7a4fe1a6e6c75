"""Restores that are verified concurrently with the first step, replicas that have drifted apart, and whole parameters
of stage 3, on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from native_case import CALLER, join, leave, save_checkpoint
from native_full import full_tensors
from native_model import Setup, make_engine, train_step

_WORLD = 2
_SETUPS = {f"stage{setup.stage}": setup for setup in (Setup(1, "sgd"), Setup(2), Setup(3), Setup(0, bf16=True))}


class Flipping:
    """The real store, but one sign of the second rank's momentum is wrong."""

    def __init__(self, store: Any, rank: int) -> None:
        self.name = store.name
        self._store = store
        self._flips = rank == 1

    def manifest(self, checkpoint_id: str) -> Any:
        return self._store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Sequence[Any]) -> Any:
        read = self._store.read(manifest, ranges)
        if self._flips:
            wanted = next(wanted for wanted in ranges if wanted.key.startswith(("exp_avg/", "momentum_buffer/")))
            wanted.target[0] = -wanted.target[0] + 1.0
        return read


def verified_concurrently(rank: int, folder: Path) -> None:
    """The same losses as when verified before the step; the first step refuses a bad state before changing anything."""
    from deepspeed_ranks import open_state

    from elastic.checkpoint.storage import CheckpointStore
    from elastic.core.errors import IntegrityError

    for name, setup in _SETUPS.items():
        if rank >= _WORLD:
            continue
        run = f"later-{name}"
        join(folder, run, rank, _WORLD)
        engine = make_engine(setup, _WORLD, seed=1)
        for step in range(2):
            train_step(engine, step)
        checkpoint = save_checkpoint(engine, folder, run, 2, CALLER)
        wanted = [train_step(engine, step) for step in range(2, 4)]
        store = CheckpointStore(folder.as_uri(), run)

        state = open_state(engine)
        assert state.restore(store, checkpoint, later=True)[1] == CALLER
        assert [train_step(engine, step) for step in range(2, 4)] == wanted
        state.verified()

        state.restore(Flipping(store, rank), checkpoint, later=True)
        before = full_tensors(engine, setup)
        message = _raised(IntegrityError, train_step, engine, 2)
        assert "differ" in message, message
        after = full_tensors(engine, setup)
        assert all(torch.equal(before[key], after[key]) for key in before if not key.startswith("buffer/"))
        # Swallowing the error does not help: nothing can be saved either.
        message = _raised(IntegrityError, partial(state.snapshot, run_id=run, generation=1, step=2, caller={}))
        assert "differ" in message, message
        leave(engine)


def drifted_replicas_are_refused(rank: int, folder: Path) -> None:
    """One rank's copy of a weight, of a frozen parameter, of a stage 0 master is another one: both ranks are told."""
    from deepspeed_ranks import open_state

    from elastic.core.errors import IntegrityError

    for setup, names in ((Setup(2), ("three", "frozen.weight")), (Setup(0), ("scale",)), (Setup(3), ())):
        if rank >= _WORLD:
            continue
        join(folder, f"drifted-{setup.stage}", rank, _WORLD)
        engine = make_engine(setup, _WORLD, seed=1)
        train_step(engine, 0)
        # Batch statistics are rank 0's by design.
        engine.module.drift.mean.add_(float(rank))
        state = open_state(engine)
        state.verify_replicas()
        for name in names:
            live = dict(engine.module.named_parameters())[name].data
            kept = live.clone()
            live.add_(float(rank))
            message = _raised(IntegrityError, state.verify_replicas)
            assert name in message, message
            live.copy_(kept)
            state.verify_replicas()
        leave(engine)


def small_parameters_are_gathered(rank: int, folder: Path) -> None:
    """In bundles of any size they are bit for bit what DeepSpeed gathers one by one, padding left out."""
    from elastic.engines.deepspeed.state.stage3 import gather, gather_in_bundles

    # Of 1, 3, 5, 7 and 77 elements over three ranks; the layers' weights stay parts.
    setup = Setup(3, zero={"stage3_param_persistence_threshold": 20})
    join(folder, "gathered", rank, 3)
    engine = make_engine(setup, 3, seed=1)
    train_step(engine, 0)
    plain, one_by_one = _with_its_gathers(engine)
    leave(engine)
    join(folder, "gathered-in-bundles", rank, 3)
    engine = make_engine(setup, 3, seed=1)
    gather_in_bundles(engine.optimizer)
    train_step(engine, 0)
    bundled, together = _with_its_gathers(engine)
    optimizer = engine.optimizer
    assert bundled == plain
    assert one_by_one - together == len(optimizer.persistent_parameters) - 1, "one for all of them after a step"
    small, everything = optimizer.persistent_parameters, list(engine.module.parameters())
    assert 10 < len(small) < len(everything)
    for chosen in (small, everything):
        optimizer.checkpoint_event_prologue()
        assert all(parameter.numel() == 0 for parameter in chosen)
        chosen[0].all_gather(chosen)
        wanted = [parameter.detach().clone() for parameter in chosen]
        for numel in (0, 12, 1 << 24):
            optimizer.checkpoint_event_prologue()
            gather(chosen, numel)
            gather(chosen, numel)
            assert all(map(torch.equal, chosen, wanted)), numel
            assert len({parameter.data_ptr() for parameter in chosen}) == len(chosen)
    optimizer.checkpoint_event_prologue()
    gather(small)
    train_step(engine, 2)
    leave(engine)


def _with_its_gathers(engine: Any) -> tuple[Any, int]:
    """The second step's loss, and in how many collectives parameters were made whole for it and after it."""
    from deepspeed import comm

    original, calls = comm.all_gather_into_tensor, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    comm.all_gather_into_tensor = counted
    try:
        return train_step(engine, 1), len(calls)
    finally:
        comm.all_gather_into_tensor = original


def _raised(kind: type[Exception], call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"expected a {kind.__name__}")


CASES = {
    run.__name__.replace("_", "-"): run
    for run in (verified_concurrently, drifted_replicas_are_refused, small_parameters_are_gathered)
}

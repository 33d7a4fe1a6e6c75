"""Bugs in what is no tensor: groups, step counts, scaler, scheduler, random streams, samples, the user's state."""

from __future__ import annotations

from typing import Any

from verification.tools import Change, changed, modules


def first_group_for_all() -> Change:
    def install(original: Any, held: Any, stored: Any) -> None:
        original(held, [stored[0]] * len(stored))

    return changed(modules().generic_extra_state, "install_groups", install)


def other_dicts() -> Change:
    """The engine's optimizer is a new one with the loaded groups; the scheduler still writes into the old ones."""
    import copy

    def install(original: Any, engine: Any, stage: Any, saved: Any) -> None:
        original(engine, stage, saved)
        stage.base = engine.native.optimizer.optimizer = copy.copy(stage.base)
        stage.base.param_groups = [dict(group) for group in stage.base.param_groups]

    return changed(modules().restore, "install_extra", install)


def steps_dropped() -> Change:
    def install(original: Any, base: Any, master: Any, tensors: Any, scalars: Any, others: Any) -> None:
        original(base, master, tensors, None if master.group == 1 else scalars, others)

    return changed(modules().restore, "install_state", install)


def step_shared() -> Change:
    def install(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        states = list(self._sharded.base.state.values())
        for state in states:
            state["step"] = next(s["step"] for s in states if s["step"] == state["step"])

    return changed(modules().restore.Restore, "_install", install)


def scaler_reset() -> Change:
    return changed(modules().extra_state, "install_scaler", lambda original, engine, stored: None)


def scheduler_replayed() -> Change:
    def install(original: Any, engine: Any, stage: Any, saved: Any) -> None:
        original(engine, stage, saved)
        for _ in range(12):
            engine.native.lr_scheduler.step()

    return changed(modules().restore, "install_extra", install)


def rate_on_one_rank() -> Change:
    """The scheduler's own state is right; one rank's group has another rate."""

    def install(original: Any, engine: Any, stage: Any, saved: Any) -> None:
        original(engine, stage, saved)
        if stage.rank == 1:
            stage.base.param_groups[1]["lr"] *= 2

    return changed(modules().restore, "install_extra", install)


def counters_fresh() -> Change:
    return changed(
        modules().restore,
        "install_extra",
        lambda original, engine, stage, saved: original(engine, stage, {**saved, "engine": {**_ZERO}}),
    )


_ZERO = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0)


def one_stream_for_all() -> Change:
    """Every rank draws what rank 0 draws: its passes have the numbers that rank 0's have."""
    from elastic.core.data.micro_batches import deal
    from elastic.training import rng as streams
    from verification.crowd import own_rank

    def stream(original: Any, seed: int, step: int, batch: int, number: int) -> Any:
        rank, world_size = own_rank()
        first = deal(step, 10, 3, world_size, rank)[0].index
        return original(seed, step, batch - first, number)

    return changed(streams, "forward_stream", stream)


def remainder_dropped() -> Change:
    """Micro-batches that do not divide by the number of ranks are left out."""
    from elastic.core.data.step_plan import StepPlan

    def deal(original: Any, self: Any, step: int) -> Any:
        count = -(-self.global_batch // self.micro_batch)
        return original(self, step)[: count // self.world_size] if self.world_size > 1 else original(self, step)

    return changed(StepPlan, "deal", deal)


def user_state_on_rank_0() -> Change:
    from elastic.training.user.state import State
    from verification.crowd import own_rank

    return changed(State, "load", lambda original, self, values: original(self, values if own_rank()[0] == 0 else {}))


def position_in_passes() -> Change:
    """The cursor is counted in passes of this world size and not in samples."""
    from elastic.core.data.step_plan import StepPlan

    def position(original: Any, self: Any, step: int) -> int:
        return step * self.micro_batch * self.world_size * self.micro_steps

    return changed(StepPlan, "position", position)


def skipped_steps_forgotten() -> Change:
    """Where a restore works out what the counters must be."""
    return changed(
        modules().extra_state,
        "counters_of",
        lambda original, engine, saved: {**original(engine, saved), "skipped_steps": 0},
    )


def scalars_of_another() -> Change:
    """Where a restore works out which scalars a tensor gets: those of the first name in the checkpoint."""
    return changed(
        modules().restore,
        "scalars_of",
        lambda original, master, by_name: next(iter(by_name.values())) if original(master, by_name) else None,
    )


def buffer_taken_for_a_cache() -> Change:
    """The check of the model leaves out what it must not."""
    return changed(modules().restore, "check_model", lambda original, *args: original(*args) | {"drift.mean"})

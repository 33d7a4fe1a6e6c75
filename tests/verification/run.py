"""One mutation, end to end: the same configuration must pass without it, and with it nothing may train."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from verification import scene
from verification.compare import differences, plain
from verification.crowd import LeftAlone
from verification.tools import Mutation, Reading

# The function in which an error began -> what the table calls that check. The innermost one counts.
_CHECKS = {
    "_one_checkpoint": "assembly: one shard per rank",
    "_check_cover": "assembly: every element once",
    "_summed": "assembly: content checks",
    "check_layout": "layout check",
    "check_model": "model check",
    "check_extra": "extra state check",
    "_copy": "plan cover",
    "check_dtypes": "dtype check",
    "raise_together": "agreement of all ranks",
    "_judge": "verification",
    "verify": "verification of the data position",
    "verify_replicas": "verification of replicas, before the snapshot",
    "compare": "verification of the capture",
}
# Start of the verification's message -> the part of the verification that raised it.
_PARTS = {
    "weights of": "weights follow masters",
    "replicas of": "replicas equal",
    "optimizer scalars": "optimizer scalars",
    "hyper-parameters": "hyper-parameters",
    "live parameter groups": "live groups",
    "optimizer state that": "nothing next to it",
    "loss scaler": "loss scaler",
    "learning-rate scheduler": "scheduler",
    "global_": "counters",
}

# Errors of a mutation that calls what is not there.
_UNFIT = ("TypeError", "ImportError", "AttributeError")


@dataclass(frozen=True)
class Verdict:
    """`caught` is empty where nothing refused it; `difference` is what it did with the verification switched off."""

    caught: str
    message: str
    difference: str
    healthy: str
    hung: bool
    seconds: float

    @property
    def good(self) -> bool:
        named = self.caught not in ("", "nothing of ours") and not self.difference.startswith(_UNFIT)
        return bool(named and self.difference and not self.healthy and not self.hung)

    @property
    def problem(self) -> str:
        """Why it is not good, in a few words."""
        if self.difference.startswith(_UNFIT):
            return f"the mutation does not fit the code any more: {self.difference}"
        if self.healthy:
            return f"fails without it: {self.healthy}"
        if self.hung:
            return "a rank would hang"
        return "it makes no difference" if not self.difference else "nothing refused it"


def examine(mutation: Mutation) -> Verdict:
    began = time.perf_counter()
    healthy = _outcome(mutation, mutated=False, checked=True)
    caught = _outcome(mutation, mutated=True, checked=True)
    off = _outcome(mutation, mutated=True, checked=False)
    name, message = _caught_by(caught.errors) if caught.errors else ("", "")
    return Verdict(
        caught=name,
        message=message,
        difference=_first(off),
        healthy=_first(healthy),
        hung=any(isinstance(error, LeftAlone) for error in caught.errors),
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Outcome:
    errors: Sequence[Exception]
    differences: Sequence[str]
    # Ranks that would have continued to train.
    trained: int = 0


def _first(outcome: _Outcome) -> str:
    if outcome.errors:
        error = outcome.errors[0]
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return outcome.differences[0] if outcome.differences else ""


def _outcome(mutation: Mutation, mutated: bool, checked: bool) -> _Outcome:
    with ExitStack() as stack:
        if not checked:
            stack.enter_context(_unchecked())
        before, after = mutation.worlds
        source = stack.enter_context(scene.world(mutation.setup, before, scene.SAVED))
        target = stack.enter_context(scene.world(mutation.setup, after, scene.FRESH))
        wanted = plain(source)
        try:
            store, checkpoint = _saved(mutation, mutated, source)
        except Exception as error:  # noqa: BLE001 - refusing to save is one way to catch a mutation
            return _Outcome([error], [])
        results = _restored(mutation, mutated, stack, target, store, checkpoint)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            return _Outcome(errors, [], len(results) - len(errors))
        return _Outcome([], differences(target, source.version, wanted, results), len(results))


def _saved(mutation: Mutation, mutated: bool, source: scene.World) -> tuple[Any, str]:
    if not mutated:
        return scene.save(source)
    if mutation.before_save is not None:
        mutation.before_save(source)
    with mutation.saving():
        return scene.save(source)


def _restored(
    mutation: Mutation, mutated: bool, stack: ExitStack, target: scene.World, store: Any, checkpoint: str
) -> list[Any]:
    if not mutated:
        return scene.restore(target, lambda rank: store, checkpoint)
    if mutation.before_restore is not None:
        mutation.before_restore(target)
    source_of: Any = lambda rank: store  # noqa: E731
    if mutation.reading is not None:
        older = stack.enter_context(scene.world(mutation.setup, target.crowd.world_size, scene.OLDER))
        older_store, older_id = scene.save(older)
        make = mutation.reading
        source_of = lambda rank: make(Reading(rank, store, older_store, older_id))  # noqa: E731
    with mutation.restoring():
        return scene.restore(target, source_of, checkpoint)


@contextmanager
def _unchecked() -> Iterator[None]:
    """The mutation's effect without the verification and the checks before it."""
    from elastic.core.checkpoint import assembly
    from elastic.engines.deepspeed.state import open as opening
    from elastic.training.data import cursor
    from elastic.training.state import engine_state, restore

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (engine_state, "Verification", lambda *_: SimpleNamespace(verdict=nothing)),
            (cursor, "verify", nothing),
            (engine_state.EngineState, "verify_replicas", nothing),
            (engine_state.EngineState, "_check", nothing),
            (restore, "check_extra", nothing),
            (restore, "check_model", lambda *_: frozenset()),
            (opening, "check_layout", nothing),
            (assembly, "_check_cover", nothing),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def _caught_by(errors: Sequence[Exception]) -> tuple[str, str]:
    """The check, and the message of the rank that saw it first."""
    own = [error for error in errors if "its own error says why" not in str(error)]
    error = (own or list(errors))[0]
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    message = str(error).splitlines()[0]
    names = [_CHECKS[frame] for frame in frames if frame in _CHECKS]
    return (_part(message) if names[-1:] == ["verification"] else names[-1] if names else "nothing of ours"), message


def _part(message: str) -> str:
    first = message.split(": ", 1)[1]
    return next(
        (f"verification: {name}" for start, name in _PARTS.items() if first.startswith(start)), "verification: content"
    )

"""The calls by which a DeepSpeed script saves and loads checkpoints itself, in a run where the platform does both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from elastic.training.scope import GenerationScope
from elastic.training.user.state import State
from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

# Where in elastic.state the `client_state` of DeepSpeed's save_checkpoint is kept.
_CLIENT_STATE, _CLIENT_STEP = "client_state", "client_state of step"


def keep_client_state(state: State, scope: GenerationScope, client_state: Mapping[str, Any] | None) -> None:
    """What `save_checkpoint` was given is kept for `restored`; the caller saves."""
    warn_once(
        logger,
        "engine.save_checkpoint: the platform saves this step to its own storage, in its own format; the folder "
        "and the tag are not used. It also saves by itself every checkpoint_every_steps steps and at the end",
    )
    if client_state:
        state[_CLIENT_STATE] = dict(client_state)
        state[_CLIENT_STEP] = scope.step


def restored(state: State, scope: GenerationScope) -> tuple[str | None, Any]:
    """(checkpoint, client_state) of what the generation began from; (None, None) for a new run."""
    warn_once(
        logger,
        "engine.load_checkpoint: nothing is loaded, elastic.initialize has restored the newest checkpoint of the "
        "run already; start another run from one with `elastic resume RUN`",
    )
    checkpoint = scope.spec.checkpoint
    of_step = state.get(_CLIENT_STEP, scope.step)
    if checkpoint is not None and of_step != scope.step:
        warn_once(
            logger,
            f"engine.load_checkpoint: client_state was given to save_checkpoint after step {of_step}, and step "
            f"{scope.step} is restored; what it counts is engine.global_steps",
        )
    return (None, None) if checkpoint is None else (checkpoint, state.get(_CLIENT_STATE, {}))

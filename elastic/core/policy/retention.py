"""Which checkpoints may be deleted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic.core.errors import UsageError
from elastic.core.names import CheckpointRef


def to_delete(
    checkpoints: Iterable[CheckpointRef],
    keep_last: int,
    keep_every_steps: int | None = None,
    protect: Collection[str] = (),
) -> tuple[CheckpointRef, ...]:
    """The complete checkpoints that no rule keeps, oldest first.

    Kept are the newest `keep_last` (at least 1), those at multiples of `keep_every_steps` (of several generations at
    one step only the newest, which replaced the others), and the ids in `protect` (being restored from, for example).
    """
    if keep_last < 1:
        raise UsageError(f"keep_last must be at least 1, got {keep_last}: a run without a checkpoint cannot recover")
    if keep_every_steps is not None and keep_every_steps < 1:
        raise UsageError(f"keep_every_steps must be at least 1, got {keep_every_steps}")
    ordered = sorted(set(checkpoints))
    kept = set(ordered[-keep_last:])
    if keep_every_steps is not None:
        kept.update({ref.step: ref for ref in ordered if ref.step % keep_every_steps == 0}.values())
    return tuple(ref for ref in ordered if ref not in kept and ref.id not in protect)

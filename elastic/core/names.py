"""Names that become paths in storage. Whatever comes from outside is checked here before it is joined to a path."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.core.errors import IntegrityError, UsageError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_CHECKPOINT_ID = re.compile(r"step-([0-9]{8,18})-g([0-9]{4,18})")


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """Which checkpoint of a run. In order: a later generation is the later truth, even where it went back in steps."""

    generation: int
    step: int

    @property
    def id(self) -> str:
        return checkpoint_id(self.step, self.generation)


def checkpoint_id(step: int, generation: int) -> str:
    """For example "step-00000040-g0003"."""
    if step < 0 or generation < 0:
        raise ValueError(f"step {step} or generation {generation} is negative")
    return f"step-{step:08d}-g{generation:04d}"


def parse_checkpoint_id(text: str) -> CheckpointRef:
    """The inverse of `checkpoint_id`; raises IntegrityError for anything that it would not have made."""
    found = _CHECKPOINT_ID.fullmatch(text)
    ref = CheckpointRef(generation=int(found[2]), step=int(found[1])) if found else None
    if ref is None or ref.id != text:
        raise IntegrityError(f"{text!r} is not the id of a checkpoint, which looks like step-00000040-g0003")
    return ref


def check_run_id(run_id: str) -> str:
    """Returns the id, or raises UsageError: a run id becomes a folder name and must not lead anywhere else."""
    if len(run_id) > 128 or not _RUN_ID.fullmatch(run_id):
        raise UsageError(f"run id {run_id[:140]!r} must be letters, digits, '-', '_' and single '.', 128 at most")
    return run_id


def check_path(path: str) -> str:
    """Returns a path relative to the storage ("" is its top), or raises IntegrityError where it leads out."""
    parts = path.split("/") if path else []
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise IntegrityError(f"{path[:220]!r} is not a path below the storage")
    return path


def shard_file(rank: int, world_size: int) -> str:
    """For example "rank-00000-of-00004.safetensors"."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def check_file(file: str) -> str:
    """Returns the name of a file inside a checkpoint's folder, or raises IntegrityError when it is no plain name."""
    if len(file) > 200 or not _FILE.fullmatch(file):
        raise IntegrityError(f"the manifest names the file {file[:220]!r}, which is not a plain file name")
    return file

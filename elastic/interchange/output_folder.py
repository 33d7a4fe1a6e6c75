"""A folder that appears whole or not at all: written next to its place under a temporary name, synced, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic.core.errors import StorageError, UsageError
from elastic.store.local import path_below

# In every export: what it was made of, and the sign that this folder may be replaced.
MARKER = "elastic-export.json"


class OutputFolder:
    """Where an export writes its files. Paths are relative to the folder and cannot lead out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where a file goes; the folders above it exist. Raises IntegrityError for a name that leads elsewhere."""
        path = Path(path_below(str(self.root), name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, text: str) -> None:
        self.path(name).write_text(text)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def output_folder(
    directory: str | os.PathLike[str], about: Mapping[str, Any], overwrite: bool
) -> Iterator[OutputFolder]:
    """The folder to write into; it is at `directory` when the block ends, and nothing is when it raises.

    Raises UsageError where something is at `directory` already. With `overwrite` an earlier export is replaced; a
    folder that no export made is never touched. Raises StorageError where the disk refuses.
    """
    final = Path(os.path.abspath(Path(directory).expanduser()))
    _check_place(final, overwrite)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        output = OutputFolder(partial)
        yield output
        output.write_json(MARKER, dict(about))
        _sync(partial)
        # Again: the export may have taken hours.
        _check_place(final, overwrite)
        _put_in_place(partial, final)
    except OSError as error:
        raise StorageError(f"the export to {final} failed: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_place(final: Path, overwrite: bool) -> None:
    if final.is_symlink():
        raise UsageError(f"{final} is a symbolic link; name the folder that it leads to")
    if not final.exists():
        return
    if not final.is_dir():
        raise UsageError(f"{final} is a file; an export needs the name of a folder")
    if not any(final.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{final} is not empty; name another folder, or replace an earlier export with --overwrite")
    if not (final / MARKER).is_file():
        raise UsageError(f"{final} is not an earlier export (it has no {MARKER}), so it is not replaced")


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename; what was there is removed after the new folder has its name."""
    old = final.with_name(f"{partial.name}.old")
    if final.exists():
        final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sync_one(final.parent)


def _sync(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for file in files:
            _sync_one(Path(place) / file)
        _sync_one(Path(place))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems that do not offer it for folders do not need it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
